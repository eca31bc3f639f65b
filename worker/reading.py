"""What a scrape of the worker's metrics reads from."""

from collections.abc import Mapping
from dataclasses import dataclass

from prefixgate.worker.model_runner import ModelSpec
from prefixgate.worker.observations import Observations
from prefixgate.worker.report import EngineReport, TenantBlocks


@dataclass(frozen=True, slots=True)
class Reading:
    """Taken once for a page, so that its figures go together."""

    counts: Observations
    report: EngineReport
    spec: ModelSpec
    tenants: Mapping[str, TenantBlocks]

    @property
    def model(self) -> str:
        return self.spec.name

    @property
    def block_size(self) -> int:
        return self.spec.kv_layout.block_size

    @property
    def dtype(self) -> str:
        """The format of keys and values, such as ``float16``."""
        return str(self.spec.kv_layout.dtype).removeprefix("torch.")
