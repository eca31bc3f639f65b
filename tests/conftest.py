"""What all tests share."""

import os
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest

from tests import counts

# The same examples in every run, so that a change is judged by itself; the soak draws new ones. No deadlines: how fast
# an example runs is the machine's affair.
hypothesis.settings.register_profile("same", derandomize=True, deadline=None)
hypothesis.settings.register_profile("soak", deadline=None, print_blob=True)
hypothesis.settings.load_profile("soak" if os.environ.get(counts.SOAK_VARIABLE) == "1" else "same")


# Triton reads this as it is imported, by whomever. Where there is no device to compile for, its interpreter runs the
# kernels.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def scaled() -> Callable[[int], int]:
    """Give `counts.scaled`: the full count under `make soak`, a twentieth of it else."""
    return counts.scaled
