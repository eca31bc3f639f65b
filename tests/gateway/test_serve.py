"""`prefixgate serve` with its real worker and gateway."""

import socket
from pathlib import Path

import grpc

from prefixgate.config.hash_key import HASH_KEY_VARIABLE
from prefixgate.proto import gateway_pb2, gateway_pb2_grpc, generation_pb2
from prefixgate.proto.transport import CHANNEL_OPTIONS
from tests.served import Served


def test_live_calls_finish_when_all_is_asked_to_stop(tmp_path: Path) -> None:
    with Served(tmp_path, "--model", "witness:step_ms=20", "--blocks", "64") as served:
        served.wait_until_ready()
        request = gateway_pb2.GenerateRequest(
            prompt="a prompt", sampling=generation_pb2.SamplingParams(max_tokens=60, ignore_eos=True)
        )
        with grpc.insecure_channel(served.address, CHANNEL_OPTIONS) as channel:
            messages = iter(gateway_pb2_grpc.GatewayStub(channel).Generate(request))
            first = next(messages)
            served.process.terminate()
            rest = list(messages)
        assert sum(len(delta.token_ids) for message in [first, *rest] for delta in message.deltas) == 60
        assert rest[-1].completion.usage.completion_tokens == 60
        assert served.finish() == 0
        assert "SIGTERM: stopping; a second signal ends everything at once" in served.lines


def test_the_key_is_secret_and_all_ends_when_the_gateway_does(tmp_path: Path) -> None:
    with Served(tmp_path, "--model", "witness", "--blocks", "64") as served:
        served.wait_until_ready()
        gateway, worker = served.child("gateway"), served.child("worker")
        keys = {child.environ()[HASH_KEY_VARIABLE] for child in (gateway, worker)}
        assert len(keys) == 1
        key = keys.pop()
        assert len(bytes.fromhex(key)) == 32
        assert not any(key in word for child in (gateway, worker) for word in child.cmdline())
        link = next(word for word in worker.cmdline() if word.startswith("--worker-listen=")).partition("unix:")[2]
        directory = Path(link).parent
        assert directory.stat().st_mode & 0o777 == 0o700

        gateway.kill()
        assert served.finish() == 1
        assert "gateway ended by itself (signal SIGKILL); stopping the rest" in served.lines
        assert not worker.is_running()
        assert not directory.exists()


def test_a_taken_port_ends_it_and_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        with Served(tmp_path, "--model", "witness", "--blocks", "64", "--gateway-http", taken) as served:
            assert served.finish() == 1
            assert "gateway ended by itself (exit code 2); stopping the rest" in served.lines
            assert taken in served.log.read_text()
