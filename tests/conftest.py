"""What all tests share."""

from collections.abc import Callable

import pytest

from tests import counts


@pytest.fixture(scope="session")
def scaled() -> Callable[[int], int]:
    """Give `counts.scaled`: the full count under `make soak`, a twentieth of it else."""
    return counts.scaled
