"""Which attention backend is chosen, and what is said of the others."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from prefixgate.cache.kv_storage import KVLayout
from prefixgate.config.kinds import Choice
from prefixgate.config.settings import WorkerSettings, setting_fields
from prefixgate.worker.attention import AttentionBackend, AttentionShape, AttentionUnavailableError
from prefixgate.worker.attention_choice import Maker, attention_makers, choose_attention
from prefixgate.worker.conversion import cache_folder
from prefixgate.worker.model_runner import ModelRefusedError
from prefixgate.worker.sdpa_attention import SdpaBackend

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SHAPE = AttentionShape(KVLayout(2, 2, 8, torch.float32), query_heads=4)
REFERENCE = SdpaBackend()


def absent(reason: str) -> Maker:
    def make(shape: AttentionShape, device: torch.device) -> AttentionBackend:
        raise AttentionUnavailableError(reason)

    return make


def present(backend: AttentionBackend) -> Maker:
    return lambda shape, device: backend


def failing(wrong: AttentionBackend, error: Exception) -> Callable[[AttentionBackend], None]:
    def prove(backend: AttentionBackend) -> None:
        if backend is wrong:
            raise error

    return prove


def accept(backend: AttentionBackend) -> None:
    """Pass every backend, as a probe that finds nothing wrong does."""


def test_the_first_that_works_is_taken_with_the_reasons_against_those_before_it() -> None:
    broken, wrong = SdpaBackend(), SdpaBackend()

    def prove(backend: AttentionBackend) -> None:
        failing(broken, RuntimeError("no kernel image is available"))(backend)
        failing(wrong, ModelRefusedError("its logits differ by 3"))(backend)

    makers = {"a": absent("not installed"), "b": present(broken), "c": present(wrong), "d": present(REFERENCE)}
    choice = choose_attention("auto", makers, SHAPE, CUDA, prove)
    assert (choice.name, choice.backend) == ("d", REFERENCE)
    assert choice.rejected == {
        "a": "not installed",
        "b": "RuntimeError: no kernel image is available",
        "c": "its logits differ by 3",
    }
    assert str(choice).startswith("attention by d; not a: not installed; not b: RuntimeError: no kernel")


def test_what_comes_after_the_chosen_one_is_not_made() -> None:
    choice = choose_attention("auto", {"a": present(REFERENCE), "b": absent("never asked")}, SHAPE, CPU, accept)
    assert (choice.name, choice.rejected, str(choice)) == ("a", {}, "attention by a")


def test_one_that_is_named_is_taken_or_refused_with_its_reason_and_never_replaced() -> None:
    makers = {"a": absent("it knows no sinks"), "b": present(REFERENCE)}
    assert choose_attention("b", makers, SHAPE, CPU, accept).name == "b"
    with pytest.raises(ModelRefusedError, match=r"worker\.attention: 'a' cannot serve this model on cpu: it knows"):
        choose_attention("a", makers, SHAPE, CPU, accept)
    with pytest.raises(ModelRefusedError, match=r"worker\.attention: 'b' .* on cpu: RuntimeError: no kernel image"):
        choose_attention("b", makers, SHAPE, CPU, failing(REFERENCE, RuntimeError("no kernel image")))
    with pytest.raises(ModelRefusedError, match=r"with worker\.attention 'b': its logits differ"):
        choose_attention("b", makers, SHAPE, CPU, failing(REFERENCE, ModelRefusedError("its logits differ")))


def test_where_the_reference_fails_too_the_model_is_at_fault_and_its_reason_is_told() -> None:
    first = SdpaBackend()
    makers = {"a": present(first), "b": present(REFERENCE)}

    def prove(backend: AttentionBackend) -> None:
        raise ModelRefusedError("its logits differ by 3" if backend is REFERENCE else "something else")

    with pytest.raises(ModelRefusedError, match=re.escape("its logits differ by 3")):
        choose_attention("auto", makers, SHAPE, CPU, prove)


def test_the_names_are_those_of_the_setting_and_the_reference_comes_last(tmp_path: Path) -> None:
    makers = attention_makers(tmp_path, lambda line: None)
    (allowed,) = [kind for entry, kind in setting_fields(WorkerSettings) if entry.name == "attention"]
    assert isinstance(allowed, Choice)
    assert allowed.choices == ("auto", *makers)
    assert list(makers)[-1] == "sdpa"
    assert isinstance(makers["sdpa"](SHAPE, CPU), SdpaBackend)


@pytest.mark.parametrize("name", ["vllm_flash_attn", "triton"])
def test_what_is_for_gpus_says_so_on_a_cpu(name: str, tmp_path: Path) -> None:
    make = attention_makers(tmp_path, lambda line: None)[name]
    with pytest.raises(AttentionUnavailableError, match="it runs on a CUDA device, and the model on cpu"):
        make(SHAPE._replace(layout=KVLayout(2, 2, 16, torch.float16)), CPU)


@pytest.mark.parametrize(("set_by_the_operator", "kept_in"), [(None, "cache/triton"), ("elsewhere", "elsewhere")])
def test_triton_compiles_into_the_cache_folder_before_it_serves(
    set_by_the_operator: str | None, kept_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Compiling(SdpaBackend):
        def prepare(self, shape: AttentionShape, device: torch.device) -> None:
            prepared.append(os.environ["TRITON_CACHE_DIR"])

    prepared: list[str] = []
    monkeypatch.setattr("prefixgate.worker.attention_choice.triton_attention", lambda shape, device: Compiling())
    monkeypatch.setenv("TRITON_CACHE_DIR", set_by_the_operator or "")
    if set_by_the_operator is None:
        monkeypatch.delenv("TRITON_CACHE_DIR")
    makers = attention_makers(Path("cache"), lambda line: None)
    assert isinstance(makers["triton"](SHAPE, CUDA), Compiling)
    assert prepared == [kept_in]


def test_the_compiled_operator_is_for_cpus() -> None:
    makers = attention_makers(cache_folder(), lambda line: None)
    with pytest.raises(AttentionUnavailableError, match="it runs on a CPU, and the model on cuda:0"):
        makers["cpu"](SHAPE, CUDA)
    odd = SHAPE._replace(layout=KVLayout(2, 2, 8, torch.float16))
    with pytest.raises(AttentionUnavailableError, match="float32 and bfloat16"):
        makers["cpu"](odd, CPU)
