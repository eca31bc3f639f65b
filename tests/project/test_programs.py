"""What `make programs` does where there is nothing to do, and where it can do nothing."""

import subprocess
import sys
from pathlib import Path

from tests.project.tree import ROOT

SCRIPT = ROOT / ".ci" / "programs"


def run(*packages: str, path: Path) -> subprocess.CompletedProcess[str]:
    """Run the script where these programs alone are found."""
    return subprocess.run(
        ["/bin/bash", str(SCRIPT), *packages], env={"PATH": str(path)}, capture_output=True, text=True, check=False
    )


def place(folder: Path, name: str, says: str = "") -> None:
    program = folder / name
    program.write_text(f"#!{sys.executable}\nprint({says!r})\n")
    program.chmod(0o755)


def test_programs_that_are_there_are_left_alone(tmp_path: Path) -> None:
    place(tmp_path, "prometheus")
    done = run("prometheus", path=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_who_is_not_root_is_told_what_is_skipped_and_goes_on(tmp_path: Path) -> None:
    place(tmp_path, "prometheus")
    place(tmp_path, "id", "1000")
    done = run("prometheus", "chromium", path=tmp_path)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "Tests that need chromium will be skipped. To run them: apt-get install chromium, as root\n"


def test_a_machine_without_apt_is_told_too(tmp_path: Path) -> None:
    place(tmp_path, "id", "0")
    done = run("prometheus", path=tmp_path)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith("Tests that need prometheus will be skipped.")
