"""How often tests repeat what only many repetitions show."""

import os

SOAK_VARIABLE = "PREFIXGATE_SOAK"


def scaled(full: int) -> int:
    """Give the full count under ``make soak`` (PREFIXGATE_SOAK=1), and a twentieth of it, at least 1, else."""
    return full if os.environ.get(SOAK_VARIABLE) == "1" else max(1, full // 20)
