"""What may be asked of the witness model, in the text after ``witness:``."""

import math
from dataclasses import dataclass
from typing import Any

from prefixgate.worker.model_runner import ModelRefusedError


@dataclass(frozen=True, slots=True)
class WitnessOptions:
    """How a witness model behaves. None of it changes what a KV slot holds."""

    eos_every: int = 0
    """Outputs end by themselves after this many tokens on average; 0 is never."""
    step_ms: float = 0.0
    """Milliseconds that each step sleeps, as if a slower device computed it."""
    prefill_us_per_token: float = 0.0
    """Microseconds that a step sleeps more for each prompt token in it."""
    context: int = 8192
    """Longest prompt plus output, in tokens."""


@dataclass(frozen=True, slots=True)
class _Bounds:
    kind: type[int] | type[float]
    lowest: int
    highest: int


_BOUNDS = {
    "eos_every": _Bounds(int, 0, 1_000_000),
    "step_ms": _Bounds(float, 0, 60_000),
    "prefill_us_per_token": _Bounds(float, 0, 1_000_000),
    "context": _Bounds(int, 2, 131_072),
}


def parse_witness(model: str) -> WitnessOptions:
    """Read ``witness`` or ``witness:eos_every=8,step_ms=5``.

    Raises ModelRefusedError that names the option, the value and what is allowed.
    """
    _, _, text = model.partition(":")
    options: dict[str, Any] = {}
    for part in text.split(",") if text else ():
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in _BOUNDS:
            raise ModelRefusedError(f"model {model!r}: no option {name!r}; there are {', '.join(_BOUNDS)}")
        if name in options:
            raise ModelRefusedError(f"model {model!r}: option {name!r} is given twice")
        options[name] = _read(model, name, value)
    return WitnessOptions(**options)


def _read(model: str, name: str, value: str) -> float:
    bounds = _BOUNDS[name]
    what = "a whole number" if bounds.kind is int else "a number"
    try:
        number = bounds.kind(value)
    except ValueError:
        number = math.nan
    if not bounds.lowest <= number <= bounds.highest:  # false for NaN too
        raise ModelRefusedError(
            f"model {model!r}: {name} = {value!r} must be {what} from {bounds.lowest} to {bounds.highest}"
        )
    return number
