"""Loading a pretrained model: from a folder or a GGUF file, with all that a gateway needs, or a reason."""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from prefixgate.cache.kv_storage import KVLayout
from prefixgate.config.cache_settings import CacheSettings
from prefixgate.config.settings import WorkerSettings
from prefixgate.worker.conversion import cache_folder
from prefixgate.worker.loader import load_runner
from prefixgate.worker.model_runner import ModelRefusedError
from prefixgate.worker.pool_size import Room
from prefixgate.worker.pretrained import load_pretrained
from prefixgate.worker.transformers_runner import TransformersRunner
from tests.worker.tiny_models import CONTEXT, llama_config, make_model, row, save_folder, write_gguf

Load = Callable[[WorkerSettings], TransformersRunner]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_model(llama_config(vocab_size=259, eos_token_id=[258, 256], bos_token_id=None))
    return save_folder(tmp_path_factory.mktemp("models") / "little-llama", model)


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Load with a cache folder of the test's own and a pool of 8 blocks. What is compiled is kept for all tests."""
    compiled = cache_folder() / "native"
    compiled.mkdir(parents=True, exist_ok=True)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "native").symlink_to(compiled)

    def load(settings: WorkerSettings) -> TransformersRunner:
        return load_pretrained(settings, lambda layout, room: 8, lambda line: None, tmp_path / "cache")

    return load


def test_a_folder_becomes_a_runner(folder: Path, load: Load) -> None:
    runner = load(WorkerSettings(model=str(folder), device="cpu"))
    assert runner.spec.name == "little-llama"
    assert runner.spec.eos_ids == (258, 256)
    assert runner.spec.vocabulary_size == 259
    assert runner.spec.context_length == CONTEXT
    assert runner.spec.kv_layout == KVLayout(2, 2, 8, torch.float32)
    assert runner.storage.num_blocks == 8
    assert runner.forward([row([1, 2, 3], 0, [7])]).shape == (1, 259)


def test_weights_may_lie_in_several_files(folder: Path, load: Load, tmp_path: Path) -> None:
    whole = load(WorkerSettings(model=str(folder), device="cpu"))
    shards = shutil.copytree(folder, tmp_path / "shards")
    (shards / "model.safetensors").unlink()
    whole.model.save_pretrained(shards, max_shard_size="20KB")
    assert len(list(shards.glob("model-*-of-*.safetensors"))) > 1
    runner = load(WorkerSettings(model=str(shards), device="cpu"))
    prompt = [row([5, 6, 7, 8], 0, [7])]
    assert torch.equal(runner.forward(prompt), whole.forward(prompt))
    first = runner.spec.fingerprint
    last = max(shards.glob("model-*-of-*.safetensors"))
    last.write_bytes(last.read_bytes()[:-1] + b"\1")
    assert load(WorkerSettings(model=str(shards), device="cpu")).spec.fingerprint != first


def test_without_a_compiler_a_model_runs_on_torch_alone_and_says_so(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    lines: list[str] = []
    settings = WorkerSettings(model=str(folder), device="cpu")
    runner = load_pretrained(settings, lambda layout, room: 8, lines.append, tmp_path)
    assert runner.forward([row([1, 2, 3], 0, [7])]).isfinite().all()
    assert runner.spec.attention == "sdpa"
    assert [line for line in lines if line.startswith("attention by sdpa") and "no-such-compiler" in line]


def test_the_pool_is_sized_by_what_the_largest_step_leaves_of_the_device(folder: Path, tmp_path: Path) -> None:
    asked: list[str] = []

    class Memory:
        """A device of 40,000 free bytes on which a step takes 4,000 more than is held before it."""

        name = "cuda:0"

        def release(self) -> None:
            asked.append("release")

        def held(self) -> int:
            asked.append("held")
            return 1000

        def highest(self) -> int:
            asked.append("highest")
            return 5000

        def free(self) -> int:
            asked.append("free")
            return 40_000

    sized: list[tuple[KVLayout, Room | None]] = []

    def pool_blocks(layout: KVLayout, room: Room | None) -> int:
        sized.append((layout, room))
        return 3

    settings = WorkerSettings(model=str(folder), device="cpu", attention="sdpa", max_batch_tokens=64, max_running=8)
    runner = load_pretrained(settings, pool_blocks, lambda line: None, tmp_path, lambda device: Memory())
    assert sized == [(runner.spec.kv_layout, Room("cuda:0", free=40_000, step=4000))]
    assert asked == ["release", "held", "highest", "release", "free"]
    assert runner.storage.num_blocks == 3
    assert not runner.storage.data.any(), "the largest step ran over blocks of its own"


def test_attention_that_is_named_serves_or_is_refused_by_its_reason(folder: Path, load: Load) -> None:
    settings = WorkerSettings(model=str(folder), device="cpu")
    assert load(replace(settings, attention="sdpa")).spec.attention == "sdpa"
    for name in ("vllm_flash_attn", "triton"):
        with pytest.raises(ModelRefusedError, match=f"worker.attention: '{name}' .* it runs on a CUDA device"):
            load(replace(settings, attention=name))


def test_the_pool_is_clean_after_the_probe(folder: Path, load: Load) -> None:
    assert not load(WorkerSettings(model=str(folder), device="cpu")).storage.data.any()


def test_text_assets_are_what_a_gateway_needs(folder: Path, load: Load) -> None:
    text = load(WorkerSettings(model=str(folder), device="cpu")).spec.text
    assert Tokenizer.from_str(text.tokenizer.decode()).encode("hé").ids == list("hé".encode())
    assert text.chat_template.startswith("{% for message in messages %}")
    assert text.template_tokens == {"eos_token": "<|im_end|>"}


def test_a_gguf_file_is_converted_and_named_after_itself(load: Load, tmp_path: Path) -> None:
    runner = load(WorkerSettings(model=str(write_gguf(tmp_path / "tiny.gguf")), device="cpu"))
    assert (runner.spec.name, runner.spec.eos_ids, runner.spec.vocabulary_size) == ("tiny", (257,), 258)
    assert "im_start" in runner.spec.text.chat_template


def test_served_name_and_number_format_can_be_set(folder: Path, load: Load) -> None:
    runner = load(WorkerSettings(model=str(folder), device="cpu", served_name="chat", dtype="bfloat16"))
    assert runner.spec.name == "chat"
    assert runner.storage.data.dtype == torch.bfloat16


def test_the_fingerprint_follows_content_and_not_names(folder: Path, load: Load, tmp_path: Path) -> None:
    settings = WorkerSettings(model=str(folder), device="cpu")
    original = load(settings).spec.fingerprint
    moved = shutil.copytree(folder, tmp_path / "moved")
    assert load(replace(settings, model=str(moved), served_name="chat")).spec.fingerprint == original
    assert load(replace(settings, dtype="bfloat16")).spec.fingerprint != original
    save_folder(moved, make_model(llama_config(vocab_size=259, eos_token_id=[258, 256], bos_token_id=None), seed=9))
    assert load(replace(settings, model=str(moved))).spec.fingerprint != original


def test_the_loader_takes_folders(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PREFIXGATE_CACHE_DIR", str(tmp_path))
    lines: list[str] = []
    runner = load_runner(WorkerSettings(model=str(folder), device="cpu"), CacheSettings(memory=3 * 4096), lines.append)
    assert isinstance(runner, TransformersRunner)
    assert runner.storage.num_blocks == 3
    assert lines[-1] == "little-llama is ready on cpu: 0 M parameters, 3 blocks of 4 KiB for 48 tokens"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (WorkerSettings(model="smollm3"), "worker.model: 'smollm3' is neither 'smollm2' nor 'witness'"),
        (WorkerSettings(model="/nowhere/x.gguf"), "no folder or .gguf file has that name"),
    ],
)
def test_a_model_that_is_not_there_is_refused(settings: WorkerSettings, reason: str, load: Load) -> None:
    with pytest.raises(ModelRefusedError, match=re.escape(reason)):
        load(settings)


@pytest.mark.parametrize("device", ["cuda:256", "cuda:999"])
def test_a_device_that_is_not_there_is_refused(folder: Path, load: Load, device: str) -> None:
    with pytest.raises(ModelRefusedError, match=rf"worker\.device: '{device}', but there are \d+ CUDA devices"):
        load(WorkerSettings(model=str(folder), device=device))


@pytest.mark.parametrize(
    ("missing", "reason"),
    [
        ("model.safetensors", r"no \*\.safetensors file"),
        ("config.json", "the model cannot be loaded"),
        ("tokenizer.json", "the tokenizer cannot be loaded"),
    ],
)
def test_a_folder_with_something_missing_is_refused(
    folder: Path, load: Load, tmp_path: Path, missing: str, reason: str
) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / missing).unlink()
    with pytest.raises(ModelRefusedError, match=reason):
        load(WorkerSettings(model=str(copy), device="cpu"))


def test_rotary_embeddings_are_looked_at(load: Load, tmp_path: Path) -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = make_model(llama_config(vocab_size=259, rope_parameters=scaling))
    with pytest.raises(ModelRefusedError, match="rotary embedding of type 'dynamic'"):
        load(WorkerSettings(model=str(save_folder(tmp_path / "moving", model)), device="cpu"))
