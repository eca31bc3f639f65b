"""Conversions are complete or absent, made once, and keep the file's numbers."""

import hashlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM

from prefixgate.worker.conversion import cache_folder, convert, converted_folder, use_plain_decoder
from prefixgate.worker.model_runner import ModelRefusedError
from prefixgate.worker.probe import stock_logits
from tests.worker.tiny_models import write_gguf


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def quiet(line: str) -> None:
    """Take progress lines that nobody reads."""


def test_the_folder_computes_what_the_file_does(gguf: Path, tmp_path: Path) -> None:
    convert(gguf, tmp_path / "model")
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "model", local_files_only=True)
    original = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    assert torch.equal(stock_logits(converted, [5, 6, 7]), stock_logits(original, [5, 6, 7]))
    assert converted.generation_config.eos_token_id == 257
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names, "the same tensor, under the name that releases before 5 do not look for"


def test_a_byte_level_tokenizer_keeps_that_decoder_alone() -> None:
    text = "two  spaces, ▁ and é"
    tokenizer = Tokenizer(BPE(vocab={sign: i for i, sign in enumerate(sorted(ByteLevel.alphabet()))}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    for others in ([], [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " ")]):
        tokenizer.decoder = decoders.Sequence([*others, decoders.ByteLevel()])
        use_plain_decoder(tokenizer)
        assert json.loads(tokenizer.to_str())["decoder"]["type"] == "ByteLevel"
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    use_plain_decoder(tokenizer)
    assert json.loads(tokenizer.to_str())["decoder"]["type"] == "Sequence"


def test_a_conversion_is_made_once_by_those_that_start_together(gguf: Path, tmp_path: Path) -> None:
    other_waits = threading.Event()
    fetched = []

    def fetch(scratch: Path) -> Path:
        fetched.append(scratch)
        assert other_waits.wait(30)
        return gguf

    def progress(line: str) -> None:
        if line.startswith("waiting for another process"):
            other_waits.set()

    def start(_: int) -> Path:
        return converted_folder("tiny", "ab" * 32, fetch, tmp_path, progress)

    with ThreadPoolExecutor(2) as threads:
        folders = set(threads.map(start, range(2)))
    assert len(folders) == len(fetched) == 1
    assert (folders.pop() / "model.safetensors").is_file()


def test_what_failed_leaves_nothing_behind_and_can_be_tried_again(gguf: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(gguf.read_bytes()[:300])
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    with pytest.raises(ModelRefusedError, match=r"broken\.gguf: the file cannot be converted"):
        converted_folder("tiny", digest, lambda _: broken, tmp_path / "cache", quiet)
    assert [path.suffix for path in (tmp_path / "cache" / "models").iterdir()] == [".lock"]
    folder = converted_folder("tiny", digest, lambda _: gguf, tmp_path / "cache", quiet)
    assert converted_folder("tiny", digest, lambda _: broken, tmp_path / "cache", quiet) == folder


def test_the_cache_folder_can_be_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PREFIXGATE_CACHE_DIR", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("PREFIXGATE_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "prefixgate"
