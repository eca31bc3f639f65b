"""Serves the embedded model, sends it real chats, and shows what the prefix cache saved. ``make demo`` runs this.

It checks what it shows: the exit code is 0 only when every expectation holds.
"""

import contextlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from prefixgate.gateway.client import Client, Message, Usage
from prefixgate.gateway.tenants import digest_api_key, new_api_key
from prefixgate.proto.transport import CHANNEL_OPTIONS

START_SECONDS = 1200
"""The first start downloads and converts the model."""
STOP_SECONDS = 90
CALL_SECONDS = 300

ATLAS, BOREALIS = "atlas", "borealis"

SYSTEM = """\
You are the assistant of Atlas, a small bookshop for travellers. You help visitors who plan a journey.

How you answer: use plain English and one short sentence. Name the fact that was asked for first. Do not greet, do not
repeat the question, and do not add advice that nobody asked for. Write names of places the way they are written in
English. When a question has one right answer, give it without doubt. When you do not know the answer, say that you do
not know it and that the visitor can ask at the desk on the ground floor.

About the shop: it is open from nine in the morning until seven in the evening, and closed on Mondays. Maps are on the
ground floor, travel guides on the first floor, and language courses on the second floor. The reading room under the
roof has tables, power sockets and free coffee. Books can be ordered by telephone and collected on the next day. Maps
that were opened cannot be returned. Guides that are older than two years are sold at half price. Groups of more than
ten people are asked to call before they come.

About journeys: the shop does not sell tickets and does not book hotels. It lends plug adapters and phrase books for a
deposit of ten euros. Visitors who ask about visas, vaccinations or the safety of a country are sent to the web pages
of their own foreign ministry, because these rules change often and the shop cannot follow all of them.
"""

Turn = tuple[str, str]
"""Role and content."""


@dataclass(frozen=True)
class Call:
    """What is asked."""

    title: str
    tenant: str
    turns: tuple[Turn, ...]
    outputs: int = 1


@dataclass(frozen=True)
class Answer:
    """What came of a call."""

    call: Call
    prompt: tuple[int, ...]
    """Token ids."""
    texts: tuple[str, ...]
    first_token_seconds: float
    usage: Usage


class Clients:
    """Calls the gateway, each tenant with its own key."""

    def __init__(self, address: str, keys: Mapping[str, str]) -> None:
        self._by_tenant = {name: Client(address, api_key=key, timeout=CALL_SECONDS) for name, key in keys.items()}

    def run(self, call: Call) -> Answer:
        """Make a streamed call, and note when its first token came."""
        client, messages = self._by_tenant[call.tenant], [Message(*turn) for turn in call.turns]
        started = time.perf_counter()
        stream = client.generate(
            messages, n=call.outputs, max_tokens=32, temperature=0.8 if call.outputs > 1 else 0.0, seed=11
        )
        next(stream)
        first_token_seconds = time.perf_counter() - started
        answer = stream.result()
        texts = tuple(output.text for output in answer.outputs)
        return Answer(call, tuple(client.tokenize(messages)), texts, first_token_seconds, answer.usage)

    def block_size(self) -> int:
        """Ask how many tokens a block holds."""
        (worker,) = self._by_tenant[ATLAS].stats().workers
        return worker.pool.block_size

    def close(self) -> None:
        """Close the connections."""
        for client in self._by_tenant.values():
            client.close()


@dataclass(frozen=True)
class Session:
    """The demo's answers, by what they show."""

    cold: Answer
    shared: Answer
    shared_again: Answer
    foreign: Answer
    second_turn: Answer
    samples: Answer

    @property
    def all(self) -> tuple[Answer, ...]:
        return (self.cold, self.shared, self.shared_again, self.foreign, self.second_turn, self.samples)


def run_calls(clients: Clients) -> Session:
    """Run the demo's calls one after another."""

    def ask(title: str, question: str, tenant: str = ATLAS, outputs: int = 1) -> Answer:
        say(f"  {title} ...")
        return clients.run(Call(title, tenant, (("system", SYSTEM), ("user", question)), outputs))

    cold = ask("cold call", "What is the capital of Italy?")
    shared = ask("same system prompt", "What is the capital of France?")
    shared_again = ask("same system prompt again", "What is the currency of Japan?")
    foreign = ask("another tenant, same text", "What is the capital of France?", BOREALIS)
    say("  second turn of the chat ...")
    turns = (*shared.call.turns, ("assistant", shared.texts[0]), ("user", "And what is the capital of Spain?"))
    second_turn = clients.run(Call("second turn of the chat", ATLAS, turns))
    samples = ask("three samples of one prompt", "Which river flows through London?", outputs=3)
    return Session(cold, shared, shared_again, foreign, second_turn, samples)


def show(session: Session) -> None:
    """Print what the calls cost, as a table."""
    say(f"\n{'':<28} {'':<9} {'prompt':>7} {'cached':>7} {'blocks':>7} {'first':>8}")
    say(f"{'call':<28} {'tenant':<9} {'tokens':>7} {'tokens':>7} {'copied':>7} {'token':>8}  answer")
    for answer in session.all:
        usage = answer.usage
        row = (
            f"{answer.call.title:<28} {answer.call.tenant:<9} {usage.prompt_tokens:>7} {usage.cached_tokens:>7} "
            f"{usage.copied_blocks:>7} {answer.first_token_seconds * 1e3:>5.0f} ms"
        )
        for text in answer.texts:
            say(f"{row}  {textwrap.shorten(text, 60, placeholder=' ...')}")
            row = " " * len(row)


def failures(session: Session, block_size: int) -> Iterator[str]:
    """Say what is not as it must be."""

    def in_full_blocks(tokens: int) -> int:
        return tokens // block_size * block_size

    for answer in (session.cold, session.foreign):
        if answer.usage.cached_tokens:
            yield f"{answer.call.title}: {answer.usage.cached_tokens} tokens cached, where it may see none"
    for answer in (session.shared, session.shared_again):
        expected = in_full_blocks(common_tokens(answer.prompt, session.cold.prompt))
        if answer.usage.cached_tokens < expected:
            yield f"{answer.call.title}: {answer.usage.cached_tokens} tokens cached; full blocks share {expected}"
    if "Paris" not in session.shared.texts[0]:
        yield f"the capital of France is Paris, not {session.shared.texts[0]!r}"
    # The token sampled last has no keys and values yet.
    first = session.shared.usage
    expected = in_full_blocks(first.prompt_tokens + first.completion_tokens - 1)
    if session.second_turn.usage.cached_tokens < expected:
        yield f"second turn: {session.second_turn.usage.cached_tokens} tokens cached; the first left {expected}"
    samples = session.samples
    # Apart from what its outputs copy, a call copies the beginning of a block that goes on differently from its prompt.
    copies = samples.usage.copied_blocks - (1 if samples.usage.partial_copy_tokens else 0)
    needed = samples.call.outputs - 1 if samples.usage.prompt_tokens % block_size else 0
    if copies != needed:
        yield f"three samples: the block in which they part was copied {copies} times; {needed} are needed"


def common_tokens(first: Sequence[int], second: Sequence[int]) -> int:
    """Count the leading tokens that two prompts share."""
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count


def show_metrics(gateway: str, worker: str) -> Iterator[str]:
    """Print the hit rate as Prometheus would see it, and say what is not as it must be."""
    pages = {address: scrape(address) for address in (gateway, worker)}
    queried = total(pages[worker], "prefixgate_worker_queried_tokens_total")
    hits = total(pages[worker], "prefixgate_worker_hit_tokens_total")
    started = total(pages[gateway], "prefixgate_gateway_calls_started_total")
    say(f"\nhttp://{gateway}/metrics: {started:.0f} calls")
    say(f"http://{worker}/metrics: {hits:.0f} of {queried:.0f} prompt tokens came from the cache")
    if not 0 < hits < queried or not started:
        yield "the metrics tell of no hits"
        return
    say(f"hit rate: {hits / queried:.1%}")


def scrape(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as page:
        text: str = page.read().decode()
    return text


def total(page: str, metric: str) -> float:
    """Sum a metric over its labels."""
    return sum(float(value) for value in re.findall(rf"^{metric}(?:{{.*}})? (\S+)$", page, re.MULTILINE))


@contextmanager
def serving(arguments: Sequence[str]) -> Iterator["subprocess.Popen[bytes]"]:
    """Run ``prefixgate serve`` and stop it as an operator would, with SIGTERM."""
    process = subprocess.Popen(
        [sys.executable, "-m", "prefixgate.gateway", "serve", *arguments], stderr=subprocess.PIPE
    )
    threading.Thread(target=pass_on_log, args=(process.stderr,), daemon=True).start()
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def pass_on_log(lines: Iterable[bytes]) -> None:
    """Pass the log on but for the lines of calls, which this program tells itself."""
    for line in lines:
        if b"prefixgate.gateway.call_log" not in line:
            sys.stderr.buffer.write(line)
            sys.stderr.flush()


def wait_until_ready(channel: grpc.Channel, process: "subprocess.Popen[bytes]") -> None:
    """Wait until the gateway serves."""
    # The library's stub would do, if its type hints knew this method.
    check = channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=HealthCheckRequest.SerializeToString,
        response_deserializer=HealthCheckResponse.FromString,
    )
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"prefixgate serve ended with exit code {process.returncode}")
        try:
            if check(HealthCheckRequest(), timeout=1).status == HealthCheckResponse.SERVING:
                return
        except grpc.RpcError:
            pass  # not listening yet
        time.sleep(0.5)
    raise RuntimeError(f"the gateway was not ready after {START_SECONDS} seconds")


def write_settings(path: Path, keys: Mapping[str, str]) -> None:
    """Write a configuration file with a tenant for each key; of the keys only digests are kept."""
    tables = [f'[tenants.{tenant}]\napi_keys = ["{digest_api_key(key.encode())}"]\n' for tenant, key in keys.items()]
    path.write_text("\n".join(['[worker]\nmodel = "smollm2"\n', *tables]))


def free_addresses(count: int) -> list[str]:
    """Find free ports of this machine."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    return addresses


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    keys = {tenant: new_api_key() for tenant in (ATLAS, BOREALIS)}
    listen, gateway_http, worker_http = free_addresses(3)
    with tempfile.TemporaryDirectory(prefix="prefixgate-demo-") as directory:
        config = Path(directory, "prefixgate.toml")
        write_settings(config, keys)
        say("starting prefixgate serve; the first start downloads and converts the model, later ones take seconds\n")
        addresses = [f"--gateway-listen={listen}", f"--gateway-http={gateway_http}", f"--worker-http={worker_http}"]
        with (
            serving([f"--config={config}", *addresses]) as process,
            grpc.insecure_channel(listen, options=CHANNEL_OPTIONS) as channel,
            contextlib.closing(Clients(listen, keys)) as clients,
        ):
            wait_until_ready(channel, process)
            say("\ncalls:")
            session = run_calls(clients)
            show(session)
            wrong = [*failures(session, clients.block_size()), *show_metrics(gateway_http, worker_http)]
            say("\nstopping")
    if process.returncode:
        wrong.append(f"prefixgate serve ended with exit code {process.returncode}")
    for each in wrong:
        say(f"NOT AS EXPECTED: {each}")
    say("not all is as expected" if wrong else "all as expected")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
