"""A prompt as the cache looks at it: packed and hashed once, for waiting, matching, admitting and publishing."""

from collections.abc import Sequence
from dataclasses import dataclass

from prefixgate.cache.hashing import ROOT_HASH, BlockHash, BlockHasher, CacheScope, pack_ids

TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids under a scope. Pure: it says nothing about what is cached."""

    scope: CacheScope
    scope_digest: bytes
    num_tokens: int
    packed: bytes
    contents: list[bytes]
    """Packed ids of the whole blocks."""
    hashes: list[BlockHash]
    """Hashes of the whole blocks."""

    @classmethod
    def of(cls, hasher: BlockHasher, scope: CacheScope, token_ids: Sequence[int]) -> "Prompt":
        """Pack and hash. Raises OverflowError for ids outside [0, 2**32)."""
        digest = hasher.scope_digest(scope)
        packed = pack_ids(token_ids)
        contents = hasher.split(packed)
        hashes = hasher.hash_blocks(ROOT_HASH, digest, contents)
        return cls(scope, digest, len(token_ids), packed, contents, hashes)

    def tokens(self, begin: int, end: int) -> bytes:
        """Packed ids of positions ``[begin, end)``."""
        return self.packed[begin * TOKEN_BYTES : end * TOKEN_BYTES]
