"""The worker as a process: its exit codes, its signals, and what it says."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from prefixgate.config.hash_key import HASH_KEY_VARIABLE

HANG_SECONDS = 60.0
KEY = {HASH_KEY_VARIABLE: "00" * 16}


def start(*arguments: str, environment: dict[str, str] = KEY) -> subprocess.Popen[str]:
    inherited = {name: value for name, value in os.environ.items() if name != HASH_KEY_VARIABLE}
    return subprocess.Popen(
        [sys.executable, "-m", "prefixgate.worker", "--worker-http=127.0.0.1:0", *arguments],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=inherited | environment,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        _, said = process.communicate(timeout=HANG_SECONDS)
    finally:
        process.kill()
    return process.returncode, said


@pytest.fixture
def listen() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="pg-") as directory:
        yield f"unix:{Path(directory) / 'worker.sock'}"


def test_a_worker_serves_until_it_is_told_to_stop_and_then_ends_well(listen: str) -> None:
    # The channel is open before the process starts: it must not matter to a process that is spawned.
    with grpc.insecure_channel(listen) as channel:
        process = start("--model=witness", "--blocks=64", f"--worker-listen={listen}")
        health: Any = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=HANG_SECONDS)
        serving = health_pb2.HealthCheckResponse.SERVING
        assert any(answer.status == serving for answer in watch)
        process.send_signal(signal.SIGTERM)
        code, said = ended(process)
    assert code == 0
    assert f"Listening on {listen}" in said
    assert "Serving witness with 64 blocks of 16 tokens" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("arguments", "environment", "code", "reason"),
    [
        (["--max-running=0"], KEY, 2, "worker.max_running: '0' is not allowed"),
        (["--model=witness"], {}, 2, "cache.hash_key is not set"),
        (["--model=witness:speed=3"], KEY, 1, "no option 'speed'"),
    ],
)
def test_what_cannot_be_served_ends_the_process_with_the_reason(
    listen: str, arguments: list[str], environment: dict[str, str], code: int, reason: str
) -> None:
    left, said = ended(start(f"--worker-listen={listen}", *arguments, environment=environment))
    assert left == code
    assert reason in said
    assert "Traceback" not in said
