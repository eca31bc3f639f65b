"""The status of a gateway and its workers as one document: what the status page shows, and `/status.json` holds.

Names of tenants and calls stand in it as they are. No text of a prompt or an answer does, and no key.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from prefixgate.config.version import VERSION
from prefixgate.gateway.errors import NoWorkerError
from prefixgate.gateway.fleet import Fleet
from prefixgate.gateway.live_calls import Call, LiveCalls
from prefixgate.gateway.member import Member
from prefixgate.gateway.routing_index import RoutingIndex
from prefixgate.gateway.status_history import StatusHistory
from prefixgate.gateway.worker_surveys import Surveyed, WorkerSurveys
from prefixgate.proto import worker_pb2

MAX_CALLS = 100
"""Calls that are told of one by one, the oldest first."""
MAX_TENANTS = 32
MAX_COMPARED = 12
"""Workers of which each pair is compared. Of more there is no saying which pair anyone wants to see."""
_MAP_SECONDS = 10.0
"""How long a map is shown while there is no newer one: a worker draws it between two steps, which can be long."""
_LOOKS = 20_000
"""Blocks that are looked for at other workers, all pairs together: a few milliseconds."""

OTHER_TENANT = "other"
_POOL = ("total", "free", "active", "cached", "pinned")
_TOTALS = (
    *("running_calls", "waiting_calls", "queried_tokens", "hit_tokens", "generated_tokens"),
    *("evicted_blocks", "copied_blocks", "preemptions"),
)
_TENANT = (
    *("active_blocks", "cached_blocks", "floor_blocks", "cap_blocks", "running_calls", "waiting_calls"),
    *("queried_tokens", "hit_tokens"),
)
_MAP = ("blocks_per_cell", "stride")
_CELLS = ("free", "active", "cached", "pinned", "holders", "owner", "sharing")


class StatusDocument:
    """Writes the document. On the event loop, where all that it reads lives."""

    def __init__(
        self, fleet: Fleet, index: RoutingIndex, live: LiveCalls, surveys: WorkerSurveys, history: StatusHistory
    ) -> None:
        self._fleet = fleet
        self._index = index
        self._live = live
        self._surveys = surveys
        self._history = history

    def write(self, *, is_draining: bool) -> dict[str, Any]:
        """Write how all stands now."""
        members = sorted(self._fleet.members(), key=lambda member: member.address)
        # Each worker's figures, tenants and map are of one moment, where it has told of all at once.
        found = {one.address: self._latest(one.address) for one in members}
        surveys = [surveyed.survey for surveyed in found.values() if surveyed is not None]
        misses = _added(survey.misses for survey in surveys)
        return {
            "time": time.time(),
            "version": VERSION,
            "state": self._state(is_draining),
            "model": self._model(),
            "pool": {name: sum(getattr(one.pool, name) for one in surveys) for name in _POOL},
            "totals": {name: sum(getattr(one, name) for one in surveys) for name in _TOTALS},
            "misses": misses,
            "calls": self._calls(),
            "tenants": self._tenants(surveys),
            "workers": [_worker(member, found[member.address]) for member in members],
            "overlap": self._overlap([member.address for member in members]),
            "history": self._history.document(misses),
        }

    def _latest(self, address: str) -> Surveyed | None:
        """Find what a worker told last, with its map unless that is of another time."""
        told, drawn = self._surveys.totals.get(address), self._surveys.maps.get(address)
        if told is None or drawn is None:
            return told
        return drawn if told.received_at - drawn.received_at < _MAP_SECONDS else told

    def _state(self, is_draining: bool) -> str:
        if is_draining:
            return "draining"
        return "ready" if self._fleet.is_ready else "no worker"

    def _model(self) -> dict[str, Any] | None:
        try:
            description = self._fleet.model.description
        except NoWorkerError:
            return None
        return {
            "name": description.model,
            "fingerprint": description.fingerprint,
            "context_length": description.context_length,
            "block_size": description.block_size,
        }

    def _calls(self) -> dict[str, Any]:
        calls = sorted(self._live.all(), key=lambda call: call.started_at)
        return {
            "live": len(calls),
            "awaiting_first_token": sum(call.awaits_token for call in calls),
            "longest_wait_seconds": self._live.longest_wait_seconds,
            "oldest": [_call(call) for call in calls[:MAX_CALLS]],
        }

    def _tenants(self, surveys: Sequence[worker_pb2.WorkerSurvey]) -> list[dict[str, Any]]:
        """Add up what the workers tell of each tenant, most blocks first."""
        by_name: dict[str, Counter[str]] = {}
        for survey in surveys:
            for tenant in survey.tenants:
                figures = by_name.setdefault(tenant.tenant, Counter())
                figures.update({name: getattr(tenant, name) for name in _TENANT})
        live = Counter(call.tenant for call in self._live.all())
        others = by_name.pop(OTHER_TENANT, Counter())
        order = sorted(by_name, key=lambda name: (-_weight(by_name[name]), name))
        for name in order[MAX_TENANTS:]:
            others.update(by_name[name])
        rows = [(name, by_name[name], live[name]) for name in order[:MAX_TENANTS]]
        rest = sum(live.values()) - sum(calls for _, _, calls in rows)
        if others or rest:
            rows.append((OTHER_TENANT, others, rest))
        return [
            {"name": name, "live_calls": calls, **{key: figures[key] for key in _TENANT}}
            for name, figures, calls in rows
        ]

    def _overlap(self, addresses: Sequence[str]) -> list[list[int]] | None:
        """Tell of each pair of workers how many blocks both hold; of a worker with itself, how many it holds."""
        if not 1 < len(addresses) <= MAX_COMPARED:
            return None
        looks = _LOOKS * 2 // (len(addresses) * (len(addresses) - 1))
        table = [[0] * len(addresses) for _ in addresses]
        for row, one in enumerate(addresses):
            table[row][row] = self._index.num_blocks(one)
            for column in range(row):
                table[row][column] = table[column][row] = self._index.overlap(one, addresses[column], looks)
        return table


def _weight(figures: Mapping[str, int]) -> int:
    return sum(figures[key] for key in ("active_blocks", "cached_blocks", "running_calls", "waiting_calls"))


def _added(counts: Any) -> dict[str, int]:
    added: Counter[str] = Counter()
    for one in counts:
        # Of what was never counted the zero is worth telling too.
        for name, count in one.items():
            added[name] += count
    return dict(sorted(added.items()))


def _call(call: Call) -> dict[str, Any]:
    record = call.record
    return {
        "id": call.request_id,
        "tenant": call.tenant,
        "method": call.method,
        "age_seconds": call.age_seconds,
        "awaits_first_token": call.awaits_token,
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "worker": record.worker,
    }


def _worker(member: Member, found: Surveyed | None) -> dict[str, Any]:
    told: dict[str, Any] = {
        "address": member.address,
        "state": _member_state(member),
        "live_calls": member.num_calls,
        "known_blocks": member.events.num_blocks,
        "survey": None,
    }
    if found is not None:
        survey = found.survey
        told["survey"] = {
            "age_seconds": time.monotonic() - found.received_at,
            "incarnation": survey.incarnation,
            "pool": {name: getattr(survey.pool, name) for name in _POOL},
            **{name: getattr(survey, name) for name in _TOTALS},
            "oldest_call_seconds": survey.oldest_call_seconds,
            "tenants": [
                {"name": one.tenant, **{name: getattr(one, name) for name in _TENANT}} for one in survey.tenants
            ],
            "map": _map(survey.map) if survey.HasField("map") else None,
        }
    return told


def _map(drawn: worker_pb2.PoolMap) -> dict[str, Any]:
    return {
        **{name: getattr(drawn, name) for name in _MAP},
        **{name: list(getattr(drawn, name)) for name in _CELLS},
    }


def _member_state(member: Member) -> str:
    if not member.client.is_ready:
        return "not connected"
    if member.is_leaving or member.events.load.draining:
        return "draining"
    if not member.client.is_responsive:
        return "not answering"
    return "serving" if member.is_well else "left alone after failures"
