"""Names for blocks: a keyed, scoped hash chain over token ids.

The specification, version 1. All integers are little-endian and of fixed width; nothing is joined without a frame.

- The *key* is a secret of at least 16 bytes that gateway and workers share. ``seed = first 8 bytes of
  SHA-256("prefixgate seed 1" + key)`` as an unsigned integer.
- The *scope digest* is ``xxh3_128(key + frame, seed)``. The frame is the byte 1 (the version), then for each of
  tenant, model, adapter and salt one type byte (1 to 4), the length of its UTF-8 bytes as 4 bytes, and those bytes.
- The *block hash* is ``xxh3_128(parent + scope digest + ids, seed)``, 16 bytes, canonical (big-endian) digest order.
  ``parent`` is the hash of the block before, or 16 zero bytes; ``ids`` are the block's token ids, 4 bytes each.

Parent and scope enter every block: a block's own tokens say nothing about the keys and values in it, since attention
has mixed in every token before them. xxh3 is no cryptographic hash, so a block hash only ever finds a candidate; what
it found is compared with what was asked for (see ``prefix_index``). Its speed and width: https://xxhash.com.
"""

import hashlib
import hmac
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NewType

from xxhash import xxh3_128_digest

BLOCK_SIZE = 16
"""Tokens in a block."""

BlockHash = NewType("BlockHash", bytes)
"""The 16-byte name of a block: of its tokens, everything before them, and who may see them."""

ROOT_HASH = BlockHash(bytes(16))
"""The parent of a first block."""

MIN_KEY_BYTES = 16
_TOKEN_BYTES = 4
_SWAPS = sys.byteorder == "big"
_SCOPE_VERSION = b"\x01"


@dataclass(frozen=True, slots=True)
class CacheScope:
    """Who may share: two requests use each other's blocks only where all four fields are equal."""

    tenant: str
    """From a verified credential, never from a request."""
    model: str
    """Name, content fingerprint and KV dtype in one string."""
    adapter: str = ""
    salt: str = ""
    """The client's own, further split of its tenant's scope."""

    def frame(self) -> bytes:
        """Encode the scope so that no two scopes have equal bytes."""
        parts = [_SCOPE_VERSION]
        for kind, text in enumerate((self.tenant, self.model, self.adapter, self.salt), start=1):
            value = text.encode()
            parts += [bytes([kind]), len(value).to_bytes(4, "little"), value]
        return b"".join(parts)


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Encode token ids as 4 little-endian bytes each.

    Raises OverflowError for an id outside [0, 2**32).
    """
    packed = array("I", token_ids)
    if _SWAPS:
        packed.byteswap()
    return packed.tobytes()


class BlockHasher:
    """Computes block hashes under one secret key.

    Hashers with equal keys agree across processes and machines; ``fingerprint`` tells whether two keys are equal
    without telling the key.
    """

    def __init__(self, key: bytes, *, block_size: int = BLOCK_SIZE) -> None:
        if len(key) < MIN_KEY_BYTES:
            raise ValueError(f"hash key: {len(key)} bytes; at least {MIN_KEY_BYTES} are needed")
        self.block_size = block_size
        self._key = key
        self._seed = int.from_bytes(hashlib.sha256(b"prefixgate seed 1" + key).digest()[:8], "little")
        self.fingerprint = hashlib.sha256(b"prefixgate key fingerprint 1" + key).digest()[:16]

    def derive(self, purpose: bytes) -> bytes:
        """Make a secret for another purpose of the key, which tells neither the key nor those for other purposes."""
        # Of the key's digest, as HMAC takes keys for equal that differ in zeros at their end.
        return hmac.digest(hashlib.sha256(self._key).digest(), b"prefixgate derived 1" + purpose, "sha256")

    def scope_digest(self, scope: CacheScope) -> bytes:
        """Digest a scope to the 16 bytes that enter each of its blocks' hashes."""
        return xxh3_128_digest(self._key + scope.frame(), self._seed)

    def hash_block(self, parent: BlockHash, scope_digest: bytes, packed_ids: bytes) -> BlockHash:
        """Hash one block from its parent's hash and its packed ids."""
        return BlockHash(xxh3_128_digest(parent + scope_digest + packed_ids, self._seed))

    def hash_blocks(self, parent: BlockHash, scope_digest: bytes, blocks: Iterable[bytes]) -> list[BlockHash]:
        """Hash a chain of blocks given as packed ids, beginning under ``parent``."""
        digest, seed, hashes = xxh3_128_digest, self._seed, []
        for packed_ids in blocks:
            parent = BlockHash(digest(parent + scope_digest + packed_ids, seed))
            hashes.append(parent)
        return hashes

    def split(self, packed_ids: bytes) -> list[bytes]:
        """Cut packed ids into whole blocks; ids that do not fill a last block are left out."""
        width = self.block_size * _TOKEN_BYTES
        return [packed_ids[i : i + width] for i in range(0, len(packed_ids) - width + 1, width)]

    def hash_tokens(self, scope: CacheScope, token_ids: Sequence[int]) -> list[BlockHash]:
        """Hash all whole blocks of a prompt, first to last."""
        return self.hash_blocks(ROOT_HASH, self.scope_digest(scope), self.split(pack_ids(token_ids)))
