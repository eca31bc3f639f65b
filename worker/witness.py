"""A diagnostic model whose every output proves that its KV slots were right.

A slot holds, in each (layer, k|v, head), four 64-bit numbers: the token, its position, the scope's tag, and a digest of
all tokens up to it. Each number is passed through an affine map of its own, so that no two places of a slot look alike.
The digest continues the one in the slot before, as read from the pool through the block table, and all places of that
slot take part in the reading. The logits are a pseudo-random function of every number in every slot below the length.
So a slot that is stale, unwritten, foreign, misplaced or wrongly chained changes the output at once and exactly.

All arithmetic is modulo 2**64; numpy's unsigned integers wrap. The digest is an affine recurrence and not a hash chain,
``digest[p] = digest[p - 1] * A + mix(token[p])``: ``A`` is odd and so has an inverse, dividing by its powers makes the
recurrence a running sum, and a prompt of any length takes a few vector operations.
"""

import hashlib
import time
from collections.abc import Sequence
from itertools import accumulate, chain

import numpy as np
import numpy.typing as npt
import torch
from xxhash import xxh3_64_intdigest

from prefixgate.cache.hashing import BLOCK_SIZE, CacheScope
from prefixgate.cache.kv_storage import KVLayout, KVStorage
from prefixgate.worker.model_runner import ModelSpec, Row
from prefixgate.worker.witness_options import WitnessOptions
from prefixgate.worker.witness_text import EOS_ID, EOS_IDS, VOCABULARY_SIZE, witness_text

Words = npt.NDArray[np.uint64]

_LAYERS, _HEADS, _FIELDS = 2, 2, 4
_PLACES = _LAYERS * 2 * _HEADS
_DIGEST = 3  # index of the digest among a slot's four fields
_GOLDEN = 0x9E3779B97F4A7C15
_DIGEST_FACTOR = 0xD1342543DE82EF95
_MODULUS = 1 << 64

_LOGIT_SPREAD = 8.0
_PRINTABLE_BONUS = 16.0
_SPECIAL_BONUS = -64.0
_EOS_DUE_BONUS = 128.0


def witness_layout() -> KVLayout:
    """Return the shape of a witness slot."""
    return KVLayout(num_layers=_LAYERS, num_kv_heads=_HEADS, head_dim=_FIELDS, dtype=torch.int64)


def scope_tag(scope: CacheScope, model_name: str) -> int:
    """Return the 64-bit tag of who may share.

    It holds no secret and nothing of the process, so that two servers give equal answers to equal calls.
    """
    return xxh3_64_intdigest(CacheScope(scope.tenant, model_name, scope.adapter, scope.salt).frame())


class WitnessModel:
    """The witness as a ``ModelRunner``, on a CPU storage that it reads and writes through a view of its memory."""

    def __init__(self, name: str, storage: KVStorage, options: WitnessOptions | None = None) -> None:
        self.options = options or WitnessOptions()
        self.storage = storage
        self.spec = ModelSpec(
            name=name,
            fingerprint=hashlib.sha256(b"prefixgate witness 1, KV int64").hexdigest(),
            vocabulary_size=VOCABULARY_SIZE,
            eos_ids=EOS_IDS,
            context_length=self.options.context,
            kv_layout=witness_layout(),
            text=witness_text(),
        )
        self._pool: Words = storage.data.numpy().view(np.uint64)
        self._blocks = self._pool.reshape(storage.num_blocks, -1)
        self._places = _Places()
        num_blocks = -(-self.options.context // BLOCK_SIZE)
        self._weights = (_random_words(num_blocks * self._blocks.shape[1], seed=2) | np.uint64(1)).reshape(
            num_blocks, *self._pool.shape[1:]
        )
        self._bonus = _logit_bonus()

    def forward(self, rows: Sequence[Row]) -> torch.Tensor:
        """Write the rows' slots, then read back what each wanted token sees."""
        self._sleep(rows)
        self._write(rows)
        states = [self._read(row.block_ids, length) for row in rows for length in _lengths_read(row)]
        return torch.from_numpy(self._logits(np.array(states, dtype=np.uint64)))

    def _sleep(self, rows: Sequence[Row]) -> None:
        prompt_tokens = sum(len(row.token_ids) for row in rows if len(row.token_ids) > 1)
        seconds = self.options.step_ms / 1e3 + self.options.prefill_us_per_token * prompt_tokens / 1e6
        if seconds:
            time.sleep(seconds)

    def _write(self, rows: Sequence[Row]) -> None:
        lengths = np.array([len(row.token_ids) for row in rows])
        starts = np.array([row.start for row in rows])
        ends = np.array(list(accumulate(lengths)))
        index = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
        tags = np.array([scope_tag(row.scope, self.spec.name) for row in rows], dtype=np.uint64)
        tokens = np.fromiter(chain.from_iterable(row.token_ids for row in rows), np.uint64, count=ends[-1])

        digests = _continue_digests(self._digests_before(rows, tags), tokens, index, lengths)
        positions = np.repeat(starts, lengths) + index
        fields = np.stack([tokens, positions.astype(np.uint64), np.repeat(tags, lengths), digests], axis=-1)
        block_ids = np.array([block for row in rows for block in _blocks_written(row)])
        self._pool[block_ids, :, :, positions % BLOCK_SIZE] = self._places.encode(fields)

    def _digests_before(self, rows: Sequence[Row], tags: Words) -> Words:
        """Read the digest that each row continues; a sequence's first slot continues the tag."""
        digests = _mix(tags)
        later = [number for number, row in enumerate(rows) if row.start > 0]
        if later:
            last = [rows[number].start - 1 for number in later]
            block_ids = [rows[number].block_ids[p // BLOCK_SIZE] for number, p in zip(later, last, strict=True)]
            slots = self._pool[block_ids, :, :, [p % BLOCK_SIZE for p in last]]
            digests[later] = self._places.decode_digests(slots)
        return digests

    def _read(self, block_ids: Sequence[int], length: int) -> int:
        """Fold all slots below the length into one word: whole blocks in one pass, then the slots of the last one."""
        whole, rest = divmod(length, BLOCK_SIZE)
        blocks = self._blocks[np.array(block_ids[:whole], dtype=np.intp)].reshape(-1)
        total = length * _GOLDEN + int(np.dot(blocks, self._weights.reshape(-1)[: blocks.size]))
        if rest:
            slots = self._pool[block_ids[whole], :, :, :rest]
            total += int((slots * self._weights[whole, :, :, :rest]).sum())
        return total % _MODULUS

    def _logits(self, states: Words) -> npt.NDArray[np.float32]:
        words = _mix(states[:, None] + np.arange(1, VOCABULARY_SIZE + 1, dtype=np.uint64) * np.uint64(_GOLDEN))
        logits = (words >> np.uint64(40)).astype(np.float32) * np.float32(_LOGIT_SPREAD / 2**24) + self._bonus
        if self.options.eos_every:
            due = _mix(states) % np.uint64(self.options.eos_every) == 0
            logits[due, EOS_ID] += np.float32(_EOS_DUE_BONUS)
        return logits


class _Places:
    """The affine map of each number of a slot, ``[layer, k|v, head, field]``, and its inverse for the digests."""

    def __init__(self) -> None:
        shape = (_LAYERS, 2, _HEADS, _FIELDS)
        words = _random_words(2 * _PLACES * _FIELDS, seed=1)
        self._factors = (words[: _PLACES * _FIELDS] | np.uint64(1)).reshape(shape)
        self._offsets = words[_PLACES * _FIELDS :].reshape(shape)
        # Any weights that sum to 1 give the digest back where all places agree on it, and another number where not.
        weights = [*range(3, 2 * _PLACES + 1, 2)]
        weights.append(1 - sum(weights))
        factors = self._factors[..., _DIGEST].reshape(-1).tolist()
        self._decoders = np.array(
            [weight * pow(factor, -1, _MODULUS) % _MODULUS for weight, factor in zip(weights, factors, strict=True)],
            dtype=np.uint64,
        ).reshape(shape[:-1])

    def encode(self, fields: Words) -> Words:
        """Turn fields ``[T, field]`` into slots ``[T, layer, k|v, head, field]``."""
        return fields[:, None, None, None, :] * self._factors + self._offsets

    def decode_digests(self, slots: Words) -> Words:
        """Read the digests ``[R]`` out of slots ``[R, layer, k|v, head, field]``."""
        encoded = slots[..., _DIGEST] - self._offsets[..., _DIGEST]
        digests: Words = (encoded * self._decoders).sum(axis=(1, 2, 3))
        return digests


def _lengths_read(row: Row) -> range:
    """Tell up to where each token whose logits are wanted sees."""
    stop = row.start + len(row.token_ids)
    return range(stop - row.num_logits + 1, stop + 1)


def _blocks_written(row: Row) -> list[int]:
    """Name the block of each token of a row."""
    return [row.block_ids[p // BLOCK_SIZE] for p in range(row.start, row.start + len(row.token_ids))]


def _continue_digests(
    before: Words, tokens: Words, index: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> Words:
    """Chain each row's tokens onto its digest; ``index`` counts the tokens within their row."""
    longest = int(lengths.max())
    powers = _powers(_DIGEST_FACTOR, longest + 1)
    inverses = _powers(pow(_DIGEST_FACTOR, -1, _MODULUS), longest)
    running = np.cumsum(_mix(tokens) * inverses[index], dtype=np.uint64)
    ends = np.cumsum(lengths)
    before_row = np.where(ends > lengths, running[ends - lengths - 1], np.uint64(0))
    digests: Words = (np.repeat(before, lengths) * powers[1] + running - np.repeat(before_row, lengths)) * powers[index]
    return digests


def _powers(factor: int, count: int) -> Words:
    """Return ``factor`` to the powers 0 to ``count - 1``."""
    powers = np.full(count, factor, dtype=np.uint64)
    powers[0] = 1
    return np.multiply.accumulate(powers)


def _mix(words: Words) -> Words:
    """Scramble each word so that every input bit reaches every output bit (the finalizer of splitmix64)."""
    words = words + np.uint64(_GOLDEN)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _random_words(count: int, *, seed: int) -> Words:
    """Return fixed pseudo-random words, equal on every machine and with every release of numpy."""
    start = np.uint64(seed << 56)
    return _mix(start + np.arange(count, dtype=np.uint64) * np.uint64(_GOLDEN))


def _logit_bonus() -> npt.NDArray[np.float32]:
    """Favour printable ASCII so that greedy output is text, and hold the special tokens back."""
    bonus = np.zeros(VOCABULARY_SIZE, dtype=np.float32)
    bonus[0x20:0x7F] = _PRINTABLE_BONUS
    bonus[256:] = _SPECIAL_BONUS
    return bonus
