"""The one model of a fleet: the first worker that comes decides, and whoever serves another is refused."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from prefixgate.gateway.errors import NoWorkerError
from prefixgate.gateway.served_model import ServedModel, WorkerRefusedError, check_description, load_model
from prefixgate.proto import worker_pb2

_SAME = ("model", "fingerprint", "vocabulary_size", "context_length", "block_size", "eos_ids", "text_digest")
"""What two workers of a fleet must agree on: answers, limits and the names of blocks follow from these."""


class CommonModel:
    """Lets workers in that serve the same, and keeps tokenizer and template once for all of them.

    Mixing two models was rejected: a call's answer, and whether it is allowed at all, would depend on who is busy.
    """

    def __init__(self, hash_key_fingerprint: bytes) -> None:
        self._fingerprint = hash_key_fingerprint
        self._loading = asyncio.Lock()
        self._serving: list[worker_pb2.ModelDescription] = []
        self._last: ServedModel | None = None
        """Kept when the last worker leaves: one that restarts most often serves the same."""
        self._shared: ServedModel | None = None

    @property
    def current(self) -> ServedModel:
        """What every worker serves, with the smallest of their bounds on a call. Raises NoWorkerError."""
        if self._shared is None:
            raise NoWorkerError
        return self._shared

    @asynccontextmanager
    async def joined(self, description: worker_pb2.ModelDescription) -> AsyncIterator[ServedModel]:
        """Count a worker in for as long as the body runs. Raises WorkerRefusedError with the names of what differs."""
        check_description(description, self._fingerprint)
        # One at a time: of two that come together and differ one must be the first.
        async with self._loading:
            self._check_same(description)
            model = self._last = await asyncio.to_thread(load_model, description, self._last)
            self._serving.append(description)
            self._update()
        try:
            yield model
        finally:
            self._serving = [other for other in self._serving if other is not description]
            self._update()

    def _check_same(self, description: worker_pb2.ModelDescription) -> None:
        if not self._serving:
            return
        first = self._serving[0]
        different = [name for name in _SAME if getattr(description, name) != getattr(first, name)]
        if dict(description.template_tokens) != dict(first.template_tokens):
            different.append("template_tokens")
        if different:
            raise WorkerRefusedError(
                f"it serves {description.model} ({description.fingerprint}) while the other workers serve "
                f"{first.model} ({first.fingerprint}); they differ in {', '.join(different)}"
            )

    def _update(self) -> None:
        if not self._serving or self._last is None:
            self._shared = None
            return
        description = worker_pb2.ModelDescription()
        description.CopyFrom(self._serving[0])
        description.max_call_tokens = min(one.max_call_tokens for one in self._serving)
        self._shared = replace(self._last, description=description)
