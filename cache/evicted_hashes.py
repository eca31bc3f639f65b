"""Remembers, for a while, the names of what was evicted."""

from collections.abc import Sequence


class EvictedHashes:
    """The hashes of blocks evicted lately, for each tenant apart: one's flood does not make another's forgotten.

    Two generations: when the young one is full it becomes the old one, and the old one is dropped whole. Membership is
    two lookups, adding is one bulk update, and nothing is ever deleted one by one; between ``capacity`` and twice as
    many are remembered.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._young: dict[str, dict[bytes, None]] = {}
        self._old: dict[str, dict[bytes, None]] = {}

    def add(self, tenant: str, hashes: Sequence[bytes]) -> None:
        young = self._young.setdefault(tenant, {})
        young.update(dict.fromkeys(hashes))
        if len(young) >= self._capacity:
            self._old[tenant] = self._young.pop(tenant)

    def __contains__(self, key: tuple[str, bytes]) -> bool:
        tenant, block_hash = key
        return block_hash in self._young.get(tenant, ()) or block_hash in self._old.get(tenant, ())

    def forget(self, tenant: str) -> None:
        self._young.pop(tenant, None)
        self._old.pop(tenant, None)
