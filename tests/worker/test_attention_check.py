"""The check that a backend must pass before it serves finds what a model's short probe does not."""

import pytest
import torch

from prefixgate.cache.kv_storage import KVLayout
from prefixgate.worker.attention import AttentionShape, AttentionUnavailableError, DecodeStep, PackedStep, Scoring
from prefixgate.worker.attention_check import check_attention
from prefixgate.worker.flash_attention import FlashAttention
from prefixgate.worker.flash_functions import FlashFunctions
from prefixgate.worker.sdpa_attention import SdpaBackend
from tests.worker.backends import NAMES, make_backend
from tests.worker.flash_double import FlashDouble

CPU = torch.device("cpu")


def shape_of(
    dtype: torch.dtype, *, windows: bool = False, softcap: bool = False, sinks: bool = False
) -> AttentionShape:
    return AttentionShape(KVLayout(2, 2, 32, dtype), 8, windows, softcap, sinks)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("asked", [{}, {"windows": True}, {"softcap": True, "sinks": True, "windows": True}])
def test_the_backends_of_a_cpu_pass(name: str, dtype: torch.dtype, asked: dict[str, bool]) -> None:
    check_attention(make_backend(name, dtype), shape_of(dtype, **asked), CPU)


@pytest.mark.parametrize("generation", ["old", "new"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_adapter_of_flash_attention_passes(generation: str, dtype: torch.dtype) -> None:
    functions = FlashFunctions(getattr(FlashDouble(), generation)())
    check_attention(FlashAttention(functions), shape_of(dtype, windows=True, softcap=True), CPU)


class Wrong(SdpaBackend):
    """The reference with one fault."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self._fault = fault

    def attend(self, query: torch.Tensor, layer: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        output, _ = super().attend_with_lse(query, layer, scoring)
        return output * 1.5 if self._fault == "outputs without sums" else output

    def attend_with_lse(
        self, query: torch.Tensor, layer: torch.Tensor, scoring: Scoring
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._fault == "window":
            scoring = scoring._replace(window=None)
        output, sums = super().attend_with_lse(query, layer, scoring)
        if self._fault == "sums":
            sums = sums.flip(1)
        return output * float("nan") if self._fault == "outputs" else output, sums


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("outputs", "its outputs differ by nan"),
        ("sums", "its sums differ by"),
        ("outputs without sums", "its outputs without sums differ by"),
        ("window", "its outputs differ by"),
    ],
)
def test_a_wrong_backend_is_found_out(fault: str, said: str) -> None:
    with pytest.raises(AttentionUnavailableError, match=said):
        check_attention(Wrong(fault), shape_of(torch.float32, windows=True), CPU)


def test_a_backend_whose_decode_steps_are_wrong_is_found_out() -> None:
    class Shifted(FlashAttention):
        def begin_decode(self, step: DecodeStep) -> None:
            super().begin_decode(step._replace(lengths=step.lengths - 1))

    with pytest.raises(AttentionUnavailableError, match="its outputs of a decode step differ"):
        check_attention(Shifted(FlashFunctions(FlashDouble().new())), shape_of(torch.bfloat16), CPU)


def test_parts_that_are_merged_without_their_weights_are_found_out() -> None:
    class Unweighted(SdpaBackend):
        def begin(self, step: PackedStep) -> None:
            # As if what rows begin with were not there.
            step.segments = [part for part in step.segments if len(part.rows) == 1]
            super().begin(step)

    with pytest.raises(AttentionUnavailableError, match="its outputs differ"):
        check_attention(Unweighted(), shape_of(torch.float32), CPU)
