"""An index that never hits: the baseline that shows what a cache is worth, and a double for tests."""

from collections.abc import Sequence

from prefixgate.cache.hashing import BlockHash
from prefixgate.cache.prefix_index import PartialMatch, PrefixIndex


class NullPrefixIndex(PrefixIndex):
    """Finds nothing and takes nothing; sequences of one call still share blocks by forking."""

    keeps = False

    def match(self, root: int, hashes: Sequence[BlockHash], contents: Sequence[bytes]) -> tuple[list[int], bool]:
        return [], False

    def longest_partial(self, node: int, continuation: bytes) -> PartialMatch | None:
        return None
