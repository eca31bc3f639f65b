"""Where a prompt leaves the tree, and why."""

from enum import StrEnum
from typing import NamedTuple

from prefixgate.cache.evicted_hashes import EvictedHashes
from prefixgate.cache.prefix_index import PartialMatch, PrefixIndex
from prefixgate.cache.prompt import TOKEN_BYTES, Prompt


class MissReason(StrEnum):
    """Why the first token that missed did."""

    NONE = "none"
    """Nothing missed but the last token, which is computed in any case."""
    NEVER_SEEN = "never_seen"
    """Nothing like it was cached in this scope, as far as is remembered. What other scopes hold looks like this too."""
    EVICTED = "evicted"
    """The block was cached and had to go."""
    DIVERGED = "diverged"
    """The prompt goes on differently than what is cached, from inside a block."""
    BYPASSED = "bypassed"
    """The call asked not to read the cache."""


class Match(NamedTuple):
    """What of a prompt is cached at this moment. A hint: it says nothing about the next moment."""

    blocks: list[int]
    """Whole blocks, in order."""
    partial: PartialMatch | None
    """Where the prompt leaves the tree inside a block: the child to copy from, or the tail to take over."""
    block_size: int
    collided: bool = False
    """Whether a hash found a block whose content was another's."""

    @property
    def cached_tokens(self) -> int:
        return len(self.blocks) * self.block_size + (self.partial.tokens if self.partial else 0)


class Explanation(NamedTuple):
    """A prompt's way through the tree, for people who ask why it missed."""

    block_hit_tokens: int
    partial_copy_tokens: int
    claimed_tail_tokens: int
    reason: MissReason
    missed_at: int
    """Position of the first token that has to be computed."""
    diverged_at: int
    """Where the reason is a divergence: its offset inside the block."""
    continuation_tokens: int
    """Where the reason is a divergence: tokens that the nearest cached continuation has from there, in its block."""


def match_prompt(index: PrefixIndex, prompt: Prompt, block_size: int) -> Match:
    """Match all but the prompt's last token, which is computed in any case: without it there are no logits. Pure."""
    root = index.find_root(prompt.scope)
    if root is None:
        return Match([], None, block_size)
    usable = (prompt.num_tokens - 1) // block_size
    blocks, collided = index.match(root, prompt.hashes[:usable], prompt.contents[:usable])
    begin = len(blocks) * block_size
    continuation = prompt.tokens(begin, min(begin + block_size, prompt.num_tokens - 1))
    partial = index.longest_partial(blocks[-1] if blocks else root, continuation) if continuation else None
    return Match(blocks, partial, block_size, collided)


def miss_reason(match: Match, prompt: Prompt, evicted: EvictedHashes) -> MissReason:
    """Why the prompt left the tree where it did."""
    if match.cached_tokens >= prompt.num_tokens - 1:
        return MissReason.NONE
    missed_block = match.cached_tokens // match.block_size
    if missed_block < len(prompt.hashes) and (prompt.scope.tenant, prompt.hashes[missed_block]) in evicted:
        return MissReason.EVICTED
    return MissReason.DIVERGED if match.partial else MissReason.NEVER_SEEN


def explain_match(
    match: Match, prompt: Prompt, index: PrefixIndex, evicted: EvictedHashes, *, claims: bool
) -> Explanation:
    """Put a match into words that can be shown to the tenant that asked."""
    reason = miss_reason(match, prompt, evicted)
    partial = match.partial
    tokens = partial.tokens if partial else 0
    diverged = reason is MissReason.DIVERGED and partial is not None
    stored = len(index.contents[partial.block]) // TOKEN_BYTES if partial else 0
    return Explanation(
        block_hit_tokens=len(match.blocks) * match.block_size,
        partial_copy_tokens=0 if claims else tokens,
        claimed_tail_tokens=tokens if claims else 0,
        reason=reason,
        missed_at=match.cached_tokens,
        diverged_at=tokens if diverged else 0,
        continuation_tokens=stored - tokens if diverged else 0,
    )
