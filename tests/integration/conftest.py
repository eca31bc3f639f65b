"""Servers that several files of tests share: starting one takes seconds."""

from collections.abc import Iterator

import pytest

from tests.integration.sidecar import SLOW_SEQUENCES, Sidecar, Started


@pytest.fixture(scope="session")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    """`prefixgate serve` with a witness that takes no time."""
    with Sidecar(tmp_path_factory.mktemp("sidecar")) as served:
        served.wait_until_ready()
        yield served
        assert served.stop() == 0
        assert served.complaints() == []


@pytest.fixture(scope="session")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """A worker and a gateway started one by one, with a witness so slow that calls last until they are ended."""
    model = "--model=witness:step_ms=10,prefill_us_per_token=10000"
    with Started(tmp_path_factory.mktemp("slow"), model, f"--max-running={SLOW_SEQUENCES}") as pair:
        yield pair
