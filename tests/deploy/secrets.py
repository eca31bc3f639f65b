"""What `deploy/secrets.sh` makes, with settings for a test: the witness model and a small pool."""

import os
import subprocess
import sys
from pathlib import Path

from tests.project.tree import ROOT

PREFIXGATE = Path(sys.executable).with_name("prefixgate")

SETTINGS = """
[worker]
model = "witness:step_ms=10"
device = "cpu"
http = "127.0.0.1:0"

[gateway]
listen = "127.0.0.1:0"
http = "127.0.0.1:0"

[cache]
blocks = 96
"""


def make_secrets(folder: Path, worker_name: str = "") -> Path:
    """Run the script as its page says, and add what a test wants to the settings."""
    run_script(folder, worker_name)
    settings = folder / "settings.toml"
    settings.write_text(settings.read_text() + SETTINGS)
    return folder


def run_script(folder: Path, *arguments: str) -> str:
    """Run `deploy/secrets.sh`; returns what it says."""
    environment = {**os.environ, "PREFIXGATE": str(PREFIXGATE)}
    command = [str(ROOT / "deploy" / "secrets.sh"), str(folder), *filter(None, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
