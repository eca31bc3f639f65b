"""The device that these tests run on, and why they do not where there is none."""

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu import why_no_device
from benchmarks.gpu_namespace import provide_prefixgate

provide_prefixgate()

DEVICE = os.environ.get("PREFIXGATE_CHECK_DEVICE", "cuda")

if TYPE_CHECKING:
    from benchmarks.gpu_rig import Rig


@pytest.fixture(scope="session")
def rig() -> Iterator["Rig"]:
    """The device; a CPU in its place where PREFIXGATE_CHECK_DEVICE says so, to try the tests themselves."""
    reason = why_no_device() if DEVICE == "cuda" else None
    if reason is not None:
        pytest.skip(reason)
    from benchmarks.gpu_rig import make_rig

    with make_rig(DEVICE) as made:
        yield made


collect_ignore: list[str] = []
if find_spec("hypothesis") is None:
    collect_ignore.append("test_copy_kernel.py")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what is left out, which pytest does not."""
    if collect_ignore:
        terminalreporter.write_line(f"left out, since hypothesis is not installed: {', '.join(collect_ignore)}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On a CPU, where the tests themselves are tried, one of each is enough."""
    if DEVICE == "cpu":
        kept = [item for item in items if _is_first(item)]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


def _is_first(item: pytest.Item) -> bool:
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return not parameters.get("seed") and bool(parameters.get("ahead", True))
