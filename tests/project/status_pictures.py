"""The pictures of the status page: `make pictures` takes them anew, of the witness at rest and under load.

They are not compared with what is in the tree: no two runs are alike to the pixel.
"""

import asyncio
import random
import sys
import tempfile
import threading
import time
from pathlib import Path

import grpc.aio

from prefixgate.proto import gateway_pb2, gateway_pb2_grpc, generation_pb2
from prefixgate.proto.transport import CHANNEL_OPTIONS
from tests.integration.browser import MISSING, PROGRAM, Viewer, browser
from tests.integration.sidecar import KEYS, Sidecar, credential
from tests.project.tree import ROOT

FOLDER = ROOT / "docs" / "images"
STATES = ("idle", "load")
SCHEMES = ("light", "dark")
SIZE = (1200, 960)

_MODEL = "witness:step_ms=12,prefill_us_per_token=150"
_BLOCKS = 700
_SYSTEM = "You guide visitors through a museum of ships, and answer in two sentences. " * 8
_DOCUMENT = "The log of the voyage tells of wind, of birds, and of a coast that nobody has seen since. "
_QUESTION = "What do you show in room "


def name_of(state: str, scheme: str) -> str:
    """Name a picture's file."""
    return f"status-{state}-{scheme}.png"


def take(folder: Path, *, calm_seconds: float = 25.0, load_seconds: float = 30.0) -> None:
    """Take all pictures: some while after a few calls, and again amid many."""
    with tempfile.TemporaryDirectory() as scratch, Sidecar(Path(scratch), model=_MODEL, blocks=_BLOCKS) as sidecar:
        sidecar.wait_until_ready()
        asyncio.run(_clients(sidecar.address, 6, time.monotonic() + 6))
        time.sleep(calm_seconds)
        _shoot(sidecar, folder, "idle")
        load = threading.Thread(
            target=lambda: asyncio.run(_clients(sidecar.address, 18, time.monotonic() + load_seconds + 15))
        )
        load.start()
        time.sleep(load_seconds)
        _shoot(sidecar, folder, "load")
        load.join()
        sidecar.stop()


def _shoot(sidecar: Sidecar, folder: Path, state: str) -> None:
    url = sidecar.gateway_page.removesuffix("/metrics") + "/status"
    with browser() as chromium:
        for scheme in SCHEMES:
            with Viewer(chromium, url, size=SIZE, scheme=scheme) as viewer:
                viewer.wait().wait()
                # What has just changed grows into its place.
                viewer.page.wait_for_timeout(600)
                viewer.page.screenshot(path=folder / name_of(state, scheme))


async def _clients(address: str, count: int, until: float) -> None:
    await _pin(address)
    await asyncio.gather(*(_client(address, random.Random(number), until) for number in range(count)))


async def _client(address: str, rng: random.Random, until: float) -> None:
    tenant = rng.choices(list(KEYS), [5, 3, 2])[0]
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        stub: gateway_pb2_grpc.GatewayAsyncStub = gateway_pb2_grpc.GatewayStub(channel)
        while time.monotonic() < until:
            async for _ in stub.Generate(_request(rng), metadata=grpc.aio.Metadata(*credential(tenant))):
                pass
            await asyncio.sleep(rng.random() / 3)


async def _pin(address: str) -> None:
    """Compute a prompt, and keep it."""
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        stub: gateway_pb2_grpc.GatewayAsyncStub = gateway_pb2_grpc.GatewayStub(channel)
        metadata = grpc.aio.Metadata(*credential("acme"))
        async for _ in stub.Warm(gateway_pb2.WarmRequest(prompt=_DOCUMENT * 4), metadata=metadata):
            pass
        await stub.Pin(gateway_pb2.PinRequest(prompt=_DOCUMENT * 4, ttl_seconds=600), metadata=metadata)


def _request(rng: random.Random) -> gateway_pb2.GenerateRequest:
    kind = rng.random()
    if kind < 0.65:
        prompt = _SYSTEM + _QUESTION + f"{rng.randrange(12)}? " * rng.randrange(1, 9)
    elif kind < 0.85:
        prompt = _DOCUMENT * 4 + f"Tell it in {rng.randrange(9)} words."
    else:
        prompt = "".join(rng.choices("abcdefgh ", k=rng.randrange(50, 300)))
    return gateway_pb2.GenerateRequest(
        prompt=prompt,
        n=rng.choice([1, 1, 1, 2]),
        request_id=f"visit-{rng.randrange(10**6):06}",
        sampling=generation_pb2.SamplingParams(max_tokens=rng.randrange(20, 100), temperature=1.0),
    )


if __name__ == "__main__":
    if PROGRAM is None:
        sys.exit(MISSING)
    take(FOLDER)
