"""Waiting for a leader, and every way in which it ends."""

from collections.abc import Sequence

import pytest

from prefixgate.cache.block_table import BlockTable
from prefixgate.cache.hashing import BlockHasher, CacheScope
from prefixgate.cache.prefix_cache import PrefixCache
from prefixgate.worker.followers import Followers
from prefixgate.worker.outbox import News
from prefixgate.worker.request import Request, SamplingParams
from tests.worker.driver import words

SCOPE = CacheScope("acme", "m")


class Silence:
    def deliver(self, step: int, news: Sequence[News]) -> None:
        """Hear nothing."""


def request() -> Request:
    return Request(words(100), SCOPE, SamplingParams(4), Silence())


def leader(cache: PrefixCache) -> BlockTable:
    admission = cache.admit(SCOPE, words(100), max_new_tokens=1)
    assert admission is not None
    return admission.table


@pytest.mark.parametrize(
    ("prompt", "common"),
    [
        (words(100), 6),
        (words(200), 6),
        (words(96), 5),
        (words(97), 6),
        (words(40), 2),
        ([*words(40), *words(60, 7)], 2),
        (words(100, 7), 0),
    ],
)
def test_common_blocks_are_those_that_can_be_had(prompt: list[int], common: int) -> None:
    cache = PrefixCache(32, BlockHasher(bytes(16)))
    followers = Followers(cache.block_size)
    assert followers.common_blocks(cache.prompt(SCOPE, prompt), leader(cache)) == common


def test_waiting_ends_with_the_common_prefix() -> None:
    cache, followers = PrefixCache(32, BlockHasher(bytes(16))), Followers(16)
    table, near, far = leader(cache), request(), request()
    followers.add(near, table, 2, until=50)
    followers.add(far, table, 6, until=50)
    for written, ready in ((20, []), (32, [near]), (80, []), (100, [far])):
        cache.publish(table, written)
        assert followers.take_ready(1) == ready
    assert near not in followers
    assert near.may_follow


def test_waiting_ends_with_the_leader() -> None:
    cache, followers = PrefixCache(32, BlockHasher(bytes(16))), Followers(16)
    table, call = leader(cache), request()
    followers.add(call, table, 6, until=50)
    assert followers.take_ready(1) == []
    cache.release(table, 0)
    assert followers.take_ready(1) == [call]
    assert call.may_follow, "another may lead now"


def test_waiting_ends_when_it_took_too_long() -> None:
    cache, followers = PrefixCache(32, BlockHasher(bytes(16))), Followers(16)
    table, call = leader(cache), request()
    followers.add(call, table, 6, until=50)
    assert followers.take_ready(49) == []
    assert followers.take_ready(50) == [call]
    assert not call.may_follow


def test_a_call_that_left_is_forgotten() -> None:
    cache, followers = PrefixCache(32, BlockHasher(bytes(16))), Followers(16)
    table, call = leader(cache), request()
    followers.add(call, table, 6, until=50)
    followers.remove(call)
    assert call not in followers
    cache.release(table, 0)
    assert followers.take_ready(100) == []
