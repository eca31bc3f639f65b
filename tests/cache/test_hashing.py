"""What names a block, and what must never name two."""

import subprocess
import sys
from array import array

import numpy as np
import pytest

from prefixgate.cache.hashing import ROOT_HASH, BlockHasher, CacheScope, pack_ids

KEY = b"0123456789abcdef"
SCOPE = CacheScope("acme", "tiny@00ff:float32", adapter="a1", salt="s1")
IDS = list(range(48))
GOLDEN = [
    "fa24f7a11b19863f4fc14d5f0f9be9c4",
    "1209102e5d24355bcb7c8389b683d693",
    "c4113c6d543e96893255c904839f910d",
]


def hashes(ids: list[int], scope: CacheScope = SCOPE, key: bytes = KEY) -> list[str]:
    return [block.hex() for block in BlockHasher(key).hash_tokens(scope, ids)]


def test_hashes_equal_the_golden_vectors() -> None:
    assert hashes(IDS) == GOLDEN


def test_any_container_of_the_same_ids_gives_the_same_hashes() -> None:
    hasher = BlockHasher(KEY)
    for ids in (tuple(IDS), array("I", IDS), array("q", IDS), np.array(IDS, np.int32), np.array(IDS, np.int64)):
        assert [block.hex() for block in hasher.hash_tokens(SCOPE, ids)] == hashes(IDS)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_another_process_gives_the_same_hashes(seed: str) -> None:
    code = (
        "from prefixgate.cache.hashing import BlockHasher, CacheScope;"
        f"s=CacheScope('acme','tiny@00ff:float32',adapter='a1',salt='s1');"
        f"print(*[h.hex() for h in BlockHasher({KEY!r}).hash_tokens(s, range(48))])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
    )
    assert out.stdout.split() == hashes(IDS)


def test_only_whole_blocks_have_hashes() -> None:
    assert len(hashes(IDS[:15])) == 0
    assert len(hashes(IDS[:16])) == 1
    assert hashes(IDS[:47]) == hashes(IDS)[:2]


def test_a_block_is_named_by_everything_before_it() -> None:
    assert hashes([1] * 16 + IDS[16:32])[1] != hashes(IDS)[1]
    repeated = hashes([7] * 64)
    assert len(set(repeated)) == 4


@pytest.mark.parametrize(
    "scope",
    [
        CacheScope("acm", "etiny@00ff:float32", "a1", "s1"),
        CacheScope("acme", "tiny@00ff:float16", "a1", "s1"),
        CacheScope("acme", "tiny@00fe:float32", "a1", "s1"),
        CacheScope("acme", "tiny@00ff:float32", "a1s", "1"),
        CacheScope("acme", "tiny@00ff:float32", "s1", "a1"),
        CacheScope("acme", "tiny@00ff:float32", "", "a1s1"),
        CacheScope("acme", "tiny@00ff:float32", "a1"),
        CacheScope("Acme", "tiny@00ff:float32", "a1", "s1"),
        CacheScope("acme\0", "tiny@00ff:float32", "a1", "s1"),
    ],
)
def test_scopes_that_differ_anywhere_share_no_hash(scope: CacheScope) -> None:
    assert not set(hashes(IDS, scope)) & set(hashes(IDS))
    assert scope.frame() != SCOPE.frame()


def test_keys_that_differ_share_no_hash_and_no_fingerprint() -> None:
    assert not set(hashes(IDS, key=KEY[::-1])) & set(hashes(IDS))
    assert BlockHasher(KEY).fingerprint != BlockHasher(KEY[::-1]).fingerprint
    assert BlockHasher(KEY).fingerprint == BlockHasher(KEY).fingerprint
    assert KEY not in BlockHasher(KEY).fingerprint


def test_a_longer_key_counts_to_its_end() -> None:
    assert hashes(IDS, key=KEY + b"x") != hashes(IDS, key=KEY + b"y")


def test_a_short_key_is_refused_with_its_length() -> None:
    with pytest.raises(ValueError, match=r"15 bytes; at least 16"):
        BlockHasher(KEY[:15])


def neighbours() -> list[list[int]]:
    base = [100 + i for i in range(16)]
    found = [base, *([base[0] + shift, base[1] - 1, *base[2:]] for shift in (31, 2, -31))]
    found.append([base[1], base[0], *base[2:]])
    found.append([*base[1:], base[0]])
    found += [[1, 23, *base[2:]], [12, 3, *base[2:]], [123, 0, *base[2:]]]
    found += [[base[0] + (1 << 16), *base[1:]], [base[0] + (1 << 31), *base[1:]], [*base[:15], base[15] + (1 << 16)]]
    return found


def test_blocks_that_nearly_agree_have_different_hashes() -> None:
    names = [hashes(ids)[0] for ids in neighbours()]
    assert len(set(names)) == len(names)


def test_ids_beyond_32_bits_are_refused_and_not_cut() -> None:
    with pytest.raises(OverflowError):
        pack_ids([1 << 32])
    with pytest.raises(OverflowError):
        pack_ids([-1])


def test_a_chain_hashed_in_parts_equals_the_chain_hashed_whole() -> None:
    hasher = BlockHasher(KEY)
    digest = hasher.scope_digest(SCOPE)
    contents = hasher.split(pack_ids(IDS))
    whole = hasher.hash_blocks(ROOT_HASH, digest, contents)
    first = hasher.hash_blocks(ROOT_HASH, digest, contents[:1])
    assert first + hasher.hash_blocks(first[-1], digest, contents[1:]) == whole
    assert hasher.hash_block(whole[0], digest, contents[1]) == whole[1]
