"""A set of token ids that may hold most of a vocabulary and is used in every step of a call."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class TokenSet:
    """Token ids in rising order, packed to four bytes each: a tuple of integers takes ten times that.

    Bytes and not an array, so that sets compare and hash by their content.
    """

    packed: bytes = b""

    @classmethod
    def of(cls, token_ids: Iterable[int]) -> Self:
        """Pack ids; repeated ones count once."""
        return cls(np.array(sorted(set(token_ids)), dtype=np.uint32).tobytes())

    def __len__(self) -> int:
        return len(self.packed) // 4

    @property
    def ids(self) -> npt.NDArray[np.uint32]:
        """The ids, ``[N]``, without a copy."""
        return np.frombuffer(self.packed, dtype=np.uint32)


NO_TOKENS = TokenSet()
