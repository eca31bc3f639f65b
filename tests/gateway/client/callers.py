"""Both clients behind one face, so that a test says once what they have in common."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from prefixgate.gateway.client import AsyncClient, Client, RetryPolicy
from tests.gateway.rig import Rig

EAGER = RetryPolicy(attempts=3, first_seconds=0.0)
"""Tries again at once."""


@dataclass
class Caller:
    """A client in a test's event loop. What the synchronous one does, a thread of its own does."""

    client: Any

    async def do(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call a method of the client or of one of its streams."""
        if isinstance(self.client, Client):
            return await asyncio.to_thread(function, *args, **options)
        answer = function(*args, **options)
        return await answer if inspect.isawaitable(answer) else answer

    async def next(self, stream: Any) -> Any:
        """Read the next piece of a stream; None at its end."""
        if isinstance(self.client, Client):
            return await asyncio.to_thread(next, stream, None)
        return await anext(stream, None)

    async def read(self, stream: Any) -> list[Any]:
        """Read what is left of a stream."""
        pieces = []
        while (piece := await self.next(stream)) is not None:
            pieces.append(piece)
        return pieces

    async def close(self, stream: Any) -> None:
        """Close a stream."""
        await self.do(stream.close if isinstance(self.client, Client) else stream.aclose)


@asynccontextmanager
async def calling(kind: type[Client] | type[AsyncClient], r: Rig, **options: Any) -> AsyncIterator[Caller]:
    """Connect a client to the gateway of a rig."""
    address = str(r.server.address)
    if kind is Client:
        with Client(address, **options) as client:
            yield Caller(client)
    else:
        async with AsyncClient(address, **options) as client:
            yield Caller(client)
