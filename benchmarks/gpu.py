"""Checks and figures of a CUDA device, in one command and a few minutes, from this tree as it is.

    python3 benchmarks/gpu.py [--json FILE] [--only PART ...] [--minutes M]

Needs torch built for CUDA with its Triton, transformers, cuda-core and grpcio, for the checks pytest, and nothing else:
neither prefixgate nor its other libraries have to be installed, and nothing is downloaded. Models have random weights
in the shape of Llama 2 7B, float16. Prints each figure as it comes, then a table with the targets, and with ``--json``
writes all as flat ``key: number`` pairs. Where there is no device, each part is skipped with the reason, and the
command succeeds; it fails where a part does. Parts:

- ``checks``: the tests in ``tests/gpu``, by pytest: copies and attention against references, and whole engines.
- ``copies``: the copy kernel beside a plain copy on the device, for 1 to 4,096 pairs of 8 MiB blocks, whole and half.
- ``capacity``: sequences of 350 tokens that 66 GiB hold when 2,048 are reserved for each, when blocks are handed out as
  they are needed, and when a prompt of 256 tokens is shared; all of them decoded at once.
- ``first``: time to the first token with 2,048 tokens cached and 64 new, and with none cached.
- ``decode``: tokens a second for 1, 16, 64 and 256 sequences with a common prefix of 256 tokens.
- ``overhead``: what a decode step of 64 sequences takes beside the model.

``--device cpu --tiny`` runs all of it in small on a CPU, to try the command itself; such figures mean nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

TARGETS: Mapping[str, tuple[str, float]] = {
    **{f"copy_whole_{pairs}_over_plain": (">=", 0.9) for pairs in (64, 256, 1024, 4096)},
    "capacity_reserved_sequences": ("==", 66),
    "capacity_paged_sequences": (">=", 384),
    "capacity_shared_sequences": (">=", 1000),
    "first_cold_over_hit": (">=", 10.0),
    "step_64_overhead_ms": ("<=", 1.0),
}
PARTS = ("checks", "copies", "capacity", "first", "decode", "overhead")


class Report:
    """What came out, part by part."""

    def __init__(self) -> None:
        self.figures: dict[str, float] = {}
        self.outcomes: dict[str, str] = {}

    def record(self, key: str, value: float) -> None:
        """Keep a figure and show it at once: a machine that is lent may be gone before the end."""
        self.figures[key] = round(value, 4)
        print(f"  {key:44} {value:12.3f}", flush=True)

    def end(self, part: str, outcome: str) -> None:
        """Keep what became of a part."""
        self.outcomes[part] = outcome
        print(f"{part}: {outcome}", flush=True)

    def table(self) -> str:
        """Write the targets beside what was found, and the parts."""
        lines = [f"{'target':36} {'wanted':>10} {'found':>12}"]
        for key, (sign, bound) in TARGETS.items():
            found = self.figures.get(key)
            met = found is not None and {">=": found >= bound, "<=": found <= bound, "==": found == bound}[sign]
            verdict = "not run" if found is None else f"{found:.3f} {'met' if met else 'MISSED'}"
            lines.append(f"{key:36} {sign} {bound:>7g} {verdict:>19}")
        lines += [f"{part:36} {outcome}" for part, outcome in self.outcomes.items()]
        return "\n".join(lines)


def why_no_device() -> str | None:
    """Tell why there is no CUDA device to check; None where there is one."""
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported: {error}"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is not built for CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device"
    return None


def run_checks(device: str) -> None:
    """Run the tests in a process of their own, with a configuration of their own: the tree's asks for plugins."""
    folder = ROOT / "tests" / "gpu"
    site = ["-S"] if sys.flags.no_site else []  # as this process was started
    command = [sys.executable, *site, "-m", "pytest", "-c", str(folder / "pytest.ini"), "--rootdir", str(folder)]
    command += ["--confcutdir", str(folder), "-p", "no:cacheprovider", "-q", str(folder)]
    environment = {**os.environ, "PREFIXGATE_CHECK_DEVICE": device, "PYTHONDONTWRITEBYTECODE": "1"}
    code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    if code:
        raise RuntimeError(f"pytest ended with {code}")


def make_parts(rig: Any, tiny: bool, record: Callable[[str, float], None]) -> dict[str, Callable[[], None]]:
    """Return the parts that measure, in small where ``tiny``. The model is made by the first that needs it."""
    import torch

    from benchmarks.gpu_copies import CopySizes, measure_copies
    from benchmarks.gpu_rig import LLAMA_2_7B, TINY
    from benchmarks.gpu_serving import Serving, ServingSizes
    from prefixgate.cache.kv_storage import KVLayout

    copies = CopySizes(KVLayout(32, 32, 128, torch.float16), (1, 4, 16, 64, 256, 1024, 4096), 8)
    sizes, shape = ServingSizes(), LLAMA_2_7B
    if tiny:
        copies = CopySizes(KVLayout(2, 2, 8, torch.float32), (1, 4), 8)
        sizes = ServingSizes(1 << 17, 128, 60, 6, 32, 64, 16, (1, 3), 32, 8, 3, 256, 1)
        shape = TINY
    elif rig.is_cuda:
        # Twice as many blocks as pairs, and room for what torch keeps.
        fit = (rig.free_bytes() - (2 << 30)) // (2 * copies.layout.block_bytes)
        copies = copies._replace(pairs=tuple(pairs for pairs in copies.pairs if pairs <= fit))
    made: list[Serving] = []

    def serving() -> Serving:
        if not made:
            made.append(Serving(rig, rig.model(shape), sizes, record))
        return made[0]

    return {
        "copies": lambda: measure_copies(rig, copies, record),
        "capacity": lambda: serving().capacity(),
        "first": lambda: serving().first_token(),
        "decode": lambda: serving().decoding(),
        "overhead": lambda: serving().overhead(),
    }


def run_parts(names: list[str], device: str, tiny: bool, until: float, report: Report) -> None:
    """Run parts one after another; one that fails does not keep the others from running."""
    if "checks" in names:
        attempt("checks", lambda: run_checks(device), report)
    if names == ["checks"]:
        return
    from benchmarks.gpu_namespace import provide_prefixgate

    provide_prefixgate()
    from benchmarks.gpu_rig import make_rig

    with make_rig(device) as rig:
        parts = make_parts(rig, tiny, report.record)
        for name in names:
            if name == "checks":
                continue
            if time.monotonic() > until:
                report.end(name, "skipped: the time is up")
                continue
            attempt(name, parts[name], report)
            rig.release()


def attempt(name: str, run: Callable[[], None], report: Report) -> None:
    """Run a part, and say what became of it and how long it took."""
    print(name, flush=True)
    begin = time.monotonic()
    try:
        run()
    except Exception as error:
        traceback.print_exc()
        report.end(name, f"FAILED: {type(error).__name__}: {error}")
    else:
        report.end(name, f"done in {time.monotonic() - begin:.0f} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--minutes", type=float, default=7.0, help="begin no part after so long (default 7)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    report = Report()
    reason = None if arguments.device == "cpu" else why_no_device()
    if reason is not None:
        print("This measures a CUDA device, and there is none here. On a machine with one, run it again.")
        for part in arguments.only:
            report.end(part, f"skipped: {reason}")
    else:
        until = time.monotonic() + 60 * arguments.minutes
        try:
            run_parts(arguments.only, arguments.device, arguments.tiny, until, report)
        except Exception as error:
            traceback.print_exc()
            report.end("setup", f"FAILED: {type(error).__name__}: {error}")
        print(report.table())
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report.figures, indent=2) + "\n")
    return int(any(outcome.startswith("FAILED") for outcome in report.outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
