"""What a worker needs of its machine, as far as can be told without loading a model."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prefixgate.config.settings import Settings, load_settings
from prefixgate.proto.finding import Finding
from prefixgate.worker import checkup
from prefixgate.worker.checkup import findings
from prefixgate.worker.memory_checks import check_memory, free_bytes
from tests.worker.tiny_models import llama_config, make_model, save_folder


def settings(**overrides: Any) -> Settings:
    return load_settings(None, {key.replace("__", "."): str(value) for key, value in overrides.items()})


def of(check: str, found: Iterator[Finding]) -> list[Finding]:
    return [finding for finding in found if finding.check == check]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """The folder of a small model."""
    return save_folder(tmp_path / "tiny", make_model(llama_config()))


class TestModel:
    def test_the_witness_is_built_in(self) -> None:
        assert [finding.level for finding in of("model", findings(settings(worker__model="witness")))] == ["ok"]

    def test_witness_options_that_are_none(self) -> None:
        (finding,) = of("model", findings(settings(worker__model="witness:speed=9")))
        assert finding.level == "problem"
        assert "speed" in finding.message

    def test_the_embedded_model_is_fetched_or_there(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PREFIXGATE_CACHE_DIR", str(tmp_path))
        assert [finding.level for finding in of("model", findings(settings()))] == ["ok", "warning"]
        made = tmp_path / "models" / "smollm2-135m-instruct-0-1"
        made.mkdir(parents=True)
        (made / "model.safetensors").touch()
        assert [finding.level for finding in of("model", findings(settings()))] == ["ok", "ok"]

    def test_a_folder_with_a_model(self, tiny: Path) -> None:
        assert [finding.level for finding in of("model", findings(settings(worker__model=tiny)))] == ["ok", "ok"]

    @pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
    def test_a_folder_without_a_part_of_one(self, tiny: Path, missing: str) -> None:
        for name in [missing, "tokenizer_config.json"] if missing == "tokenizer.json" else [missing]:
            (tiny / name).unlink(missing_ok=True)
        (*_, finding) = of("model", findings(settings(worker__model=tiny)))
        assert finding.level == "problem"
        assert finding.remedy

    @pytest.mark.parametrize(("content", "level"), [(b"GGUF\x03", "ok"), (b"PK", "problem"), (None, "problem")])
    def test_a_gguf_file(self, tmp_path: Path, content: bytes | None, level: str) -> None:
        path = tmp_path / "model.gguf"
        if content is not None:
            path.write_bytes(content)
        (*_, finding) = of("model", findings(settings(worker__model=path)))
        assert finding.level == level


class TestMachine:
    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
    def test_a_device_that_is_not_there(self) -> None:
        (finding,) = of("device", findings(settings(worker__model="witness", worker__device="cuda:1")))
        assert (finding.level, "0 CUDA devices" in finding.message) == ("problem", True)

    def test_a_device_and_the_parts_that_use_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        card = SimpleNamespace(name="a card", major=9, minor=0)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 34, 1 << 35))
        real = importlib.util.find_spec
        there = {"cuda.core": None, "triton": None, "vllm_flash_attn": None, "vllm": real("json")}
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: there.get(name, real(name)))
        found = list(findings(settings(worker__model="witness", worker__device="cuda:1", cache__blocks=64)))
        assert ["compute capability 9.0" in finding.message for finding in found if finding.check == "device"] == [True]
        parts = {finding.message: finding.level for finding in found if finding.check == "parts"}
        assert parts == {"no cuda.core": "warning", "no triton": "warning", "vllm is there": "ok"}
        assert [finding.message.endswith("cuda:1") for finding in found if finding.check == "memory"] == [True]

    def test_a_compiler(self, monkeypatch: pytest.MonkeyPatch) -> None:
        wanted = settings(worker__model="witness", worker__device="cpu")
        monkeypatch.setenv("CXX", "python3 -x")
        assert [finding.level for finding in of("parts", findings(wanted))] == ["ok"]
        monkeypatch.setenv("CXX", "no-such-compiler")
        assert [finding.level for finding in of("parts", findings(wanted))] == ["warning"]

    def test_without_the_extra_there_is_no_more_to_look_at(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        (finding,) = findings(settings())
        assert (finding.level, "prefixgate[worker]" in finding.remedy) == ("problem", True)

    def test_the_program_writes_json(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert checkup.main(["--model", "witness", "--device", "cpu"]) == 0
        assert {item["check"] for item in json.loads(capsys.readouterr().out)} >= {"device", "model", "memory"}


class TestMemory:
    @pytest.fixture
    def machine(self, tmp_path: Path) -> Path:
        (tmp_path / "meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:  4000 kB\n")
        return tmp_path

    def free(self, machine: Path) -> int | None:
        return free_bytes(torch.device("cpu"), machine / "meminfo", machine)

    def test_what_the_machine_says(self, machine: Path) -> None:
        assert self.free(machine) == 4000 * 1024
        (machine / "meminfo").unlink()
        assert self.free(machine) is None

    @pytest.mark.parametrize(("bound", "free"), [("max", 4000 * 1024), ("3000000", 2_000_000), ("900000", 0)])
    def test_a_container_has_a_bound_of_its_own(self, machine: Path, bound: str, free: int) -> None:
        (machine / "memory.max").write_text(f"{bound}\n")
        (machine / "memory.current").write_text("1000000\n")
        assert self.free(machine) == free

    @pytest.mark.parametrize(("blocks", "level"), [(64, "ok"), (1 << 30, "problem")])
    def test_a_pool_in_blocks(self, tiny: Path, blocks: int, level: str) -> None:
        for model in ("witness", tiny):
            wanted = settings(worker__model=model, worker__device="cpu", cache__blocks=blocks)
            assert [finding.level for finding in check_memory(wanted)] == [level]

    def test_a_pool_in_bytes(self) -> None:
        wanted = settings(worker__model="witness", worker__device="cpu", cache__memory="1000TiB")
        (finding,) = check_memory(wanted)
        assert (finding.level, "--kv-memory" in finding.remedy) == ("problem", True)

    def test_a_model_that_is_not_there_yet_has_no_size(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PREFIXGATE_CACHE_DIR", str(tmp_path))
        assert list(check_memory(settings(worker__device="cpu"))) == []
