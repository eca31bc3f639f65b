"""The metrics of each worker, read from the fleet as it is."""

from collections.abc import Callable

from prefixgate.gateway import metrics as table
from prefixgate.gateway.fleet import Fleet
from prefixgate.gateway.member import Member
from prefixgate.gateway.metrics import Readings
from prefixgate.proto.exposition import Samples


def fleet_readings(fleet: Fleet) -> Readings:
    """Make the readings. A worker that has left is on the page no more, so that no churn makes it grow."""

    def of_each(read: Callable[[Member], float]) -> Callable[[], Samples]:
        return lambda: {(member.address,): read(member) for member in fleet.members()}

    return {
        table.WORKER_UP: of_each(lambda member: member.is_well),
        table.WORKER_LIVE_CALLS: of_each(lambda member: member.num_calls),
        table.WORKER_CALLS: of_each(lambda member: member.num_placed),
        table.WORKER_RETRIED_CALLS: of_each(lambda member: member.num_retried),
        table.WORKER_EJECTIONS: of_each(lambda member: member.num_ejections),
        table.WORKER_KNOWN_BLOCKS: of_each(lambda member: member.events.num_blocks),
        table.WORKER_RESYNCS: of_each(lambda member: member.events.num_resyncs),
    }
