"""Which block holds which tokens: a tree of logical nodes, found by hash and verified by content.

A node is (parent node, token ids). It has exactly one block, its canonical block, and is named by that block's id;
so "node" and "block id" are one number here. Each scope has a root of its own, numbered from ``num_blocks`` upward,
so a walk that begins at one scope's root cannot reach another scope's blocks, whatever the hash function does.

Full nodes are found through ``hash -> block``. A hash only finds a candidate: parent and token ids are then compared,
and since the parents lead to the root, so is the scope. A collision costs a miss and is counted.

A *tail* is a partial node: the unfinished last block of a finished sequence. It has no hash and no children. A prompt
that leaves the tree inside a block is compared with its parent's children, at most ``SIBLING_SCAN`` of them, newest
first; beyond those a tail is still found by its content, so that a conversation finds its own end among thousands.

The tree's links are kept in lists by block id and not in node objects: a 2,048-block prompt is matched, linked and
unlinked by list operations that cost some 50 ns each.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from prefixgate.cache.hashing import BlockHash, CacheScope

SIBLING_SCAN = 32
"""Children looked at for the longest common token prefix, newest first. A node with more is a fan-out such as the end
of a system prompt, where a longer scan finds a token or two more and costs every miss that ends there."""

NONE = -1
_BITS_PER_TOKEN = 32


class PartialMatch(NamedTuple):
    """The child that shares most leading tokens with what a prompt goes on with."""

    block: int
    tokens: int
    """Leading tokens in common, at least 1."""
    whole_tail: bool
    """Whether the child is a tail and these are all its tokens."""


class PrefixIndex:
    """Hash to block, parent to children: the tree of what is cached."""

    keeps = True
    """Whether blocks can be published here at all."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.parents = [NONE] * num_blocks
        """Parent of each node; NONE for blocks that are no node."""
        self.contents: list[bytes] = [b""] * num_blocks
        """Packed token ids of each node."""
        self.hashes: list[BlockHash | None] = [None] * num_blocks
        """Hash of each full node; None for tails."""
        self.first_child = [NONE] * num_blocks
        self._next_sibling = [NONE] * num_blocks
        self._previous_sibling = [NONE] * num_blocks
        self._by_hash: dict[BlockHash, int] = {}
        self._tails: dict[tuple[int, bytes], int] = {}
        self._roots: dict[CacheScope, int] = {}
        self._scopes: dict[int, CacheScope] = {}
        self._root_users: dict[int, int] = {}
        self._free_roots: list[int] = []
        self._detached: set[int] = set()
        self.version = 0
        """Changes whenever the tree does."""
        self.collisions_total = 0
        """Candidates that a hash found and the comparison refused."""

    def __len__(self) -> int:
        return len(self._by_hash)

    # Roots: one for each scope that has nodes or users; dropped with the last of them, since salts are the clients'
    # to choose and would otherwise grow without bound.

    def find_root(self, scope: CacheScope) -> int | None:
        return self._roots.get(scope)

    def scope_of(self, root: int) -> CacheScope:
        return self._scopes[root]

    def roots(self) -> Iterator[int]:
        return iter(self._scopes)

    def roots_of(self, tenant: str, salt: str | None = None) -> list[int]:
        """Roots of a tenant's scopes that can be found; with a salt, of those under it only."""
        own = ((scope, root) for scope, root in self._roots.items() if scope.tenant == tenant)
        return [root for scope, root in own if salt is None or scope.salt == salt]

    def root_of(self, node: int) -> int:
        """The root above a node; O(depth)."""
        while node < self.num_blocks:
            node = self.parents[node]
        return node

    def hold_root(self, scope: CacheScope) -> int:
        """The scope's root, made where there is none, kept until ``drop_root`` is called as often as this."""
        root = self._roots.get(scope)
        if root is None:
            if self._free_roots:
                root = self._free_roots.pop()
            else:
                root = len(self.first_child)
                self.first_child.append(NONE)
            self._roots[scope] = root
            self._scopes[root] = scope
            self._root_users[root] = 0
        self._root_users[root] += 1
        return root

    def share_root(self, root: int) -> None:
        """Keep a root that is kept already for one more user."""
        self._root_users[root] += 1

    def drop_root(self, root: int) -> None:
        self._root_users[root] -= 1
        self._forget_unused_root(root)

    def _forget_unused_root(self, root: int) -> None:
        if self._root_users[root] == 0 and self.first_child[root] == NONE:
            scope = self._scopes.pop(root)
            if root in self._detached:
                self._detached.remove(root)
            else:
                del self._roots[scope]
            del self._root_users[root]
            self._free_roots.append(root)

    def detach_root(self, root: int) -> None:
        """Let nothing below a root be found any more: its scope begins anew, what is held stays where it is."""
        del self._roots[self._scopes[root]]
        self._detached.add(root)
        self.version += 1
        for node in self.walk(root):
            block_hash = self.hashes[node]
            if block_hash is not None and self._by_hash.get(block_hash) == node:
                del self._by_hash[block_hash]
        self._forget_unused_root(root)

    def is_detached(self, root: int) -> bool:
        return root in self._detached

    # Questions

    def walk(self, root: int) -> list[int]:
        """All nodes below a root, parents before their children."""
        nodes = list(self.children(root))
        for node in nodes:
            nodes += self.children(node)
        return nodes

    def is_node(self, block: int) -> bool:
        return self.parents[block] != NONE

    def is_tail(self, block: int) -> bool:
        return self.parents[block] != NONE and self.hashes[block] is None

    def children(self, node: int) -> Iterator[int]:
        """Children of a node, newest first."""
        child = self.first_child[node]
        while child != NONE:
            yield child
            child = self._next_sibling[child]

    def is_only_child(self, node: int) -> bool:
        """Whether a node's parent has no other child."""
        return self._next_sibling[node] == NONE and self._previous_sibling[node] == NONE

    def find(self, block_hash: BlockHash) -> int | None:
        """The candidate for a hash, not verified."""
        return self._by_hash.get(block_hash)

    def has_none_of(self, hashes: Sequence[BlockHash]) -> bool:
        """Whether a chain with these hashes can be inserted as it is: none is known, and none comes twice."""
        return self._by_hash.keys().isdisjoint(hashes) and len(set(hashes)) == len(hashes)

    def match(self, root: int, hashes: Sequence[BlockHash], contents: Sequence[bytes]) -> tuple[list[int], bool]:
        """Find the longest chain of nodes under a root. Changes nothing.

        Returns the blocks, first to last, and whether the chain ended at a candidate that failed the comparison.
        """
        get, found = self._by_hash.get, []
        for block_hash in hashes:
            block = get(block_hash)
            if block is None:
                break
            found.append(block)
        # Whole lists are compared in C, since nearly always they are equal; the search for the first that differs is
        # for collisions only.
        above = [root, *found][: len(found)]
        parents = [self.parents[block] for block in found]
        stored = [self.contents[block] for block in found]
        if parents == above and stored == contents[: len(found)]:
            return found, False
        pairs = zip(parents, above, stored, contents, strict=False)
        agreeing = next(i for i, (a, b, c, d) in enumerate(pairs) if a != b or c != d)
        return found[:agreeing], True

    def longest_partial(self, node: int, continuation: bytes) -> PartialMatch | None:
        """Find the child of a node that begins most like a continuation (packed ids, at most a block). Pure."""
        child = self.first_child[node]
        if child == NONE:
            return None
        contents, next_sibling = self.contents, self._next_sibling
        nearest, most, left = NONE, 0, SIBLING_SCAN
        first_token = continuation[:4]
        while child != NONE and left:
            # Most siblings differ in their first token: one comparison, and no number is made of them.
            if contents[child].startswith(first_token):
                tokens = common_tokens(contents[child], continuation)
                if tokens > most:
                    nearest, most = child, tokens
            child = next_sibling[child]
            left -= 1
        if child != NONE:
            nearest, most = self._longest_tail(node, continuation, nearest, most)
        if nearest == NONE:
            return None
        whole = self.hashes[nearest] is None and most * 4 == len(contents[nearest])
        return PartialMatch(nearest, most, whole)

    def _longest_tail(self, node: int, continuation: bytes, nearest: int, most: int) -> tuple[int, int]:
        """Look beyond the scan for a longer tail that the continuation begins with: 15 questions at most."""
        for tokens in range(len(continuation) // 4, most, -1):
            tail = self._tails.get((node, continuation[: tokens * 4]))
            if tail is not None:
                return tail, tokens
        return nearest, most

    # Changes

    def insert(self, block: int, parent: int, content: bytes, block_hash: BlockHash | None) -> None:
        """Make a block the node (parent, content). The node must not exist; a tail has no hash."""
        self.version += 1
        sibling = self.first_child[parent]
        self.first_child[parent] = block
        self._next_sibling[block] = sibling
        if sibling != NONE:
            self._previous_sibling[sibling] = block
        self._previous_sibling[block] = NONE
        self.parents[block] = parent
        self.contents[block] = content
        self.hashes[block] = block_hash
        if block_hash is None:
            self._tails[parent, content] = block
        else:
            self._by_hash[block_hash] = block

    def insert_chain(
        self, blocks: Sequence[int], parent: int, contents: Sequence[bytes], hashes: Sequence[BlockHash]
    ) -> None:
        """Insert nodes each of which is the parent of the next. None of them may exist."""
        self.insert(blocks[0], parent, contents[0], hashes[0])
        parents, stored, named, first_child = self.parents, self.contents, self.hashes, self.first_child
        next_sibling, previous_sibling = self._next_sibling, self._previous_sibling
        above = blocks[0]
        for position in range(1, len(blocks)):
            block = blocks[position]
            first_child[above] = block
            next_sibling[block] = previous_sibling[block] = NONE
            parents[block] = above
            stored[block] = contents[position]
            named[block] = hashes[position]
            above = block
        self._by_hash.update(zip(hashes, blocks, strict=True))

    def discard(self, block: int) -> int:
        """Remove a node without children. Returns its parent."""
        if self.first_child[block] != NONE:
            raise RuntimeError(f"node {block} was to be discarded while it has children")
        self.version += 1
        block_hash = self.hashes[block]
        parent = self.parents[block]
        if block_hash is None:
            del self._tails[parent, self.contents[block]]
        elif self._by_hash.get(block_hash) == block:  # not so below a detached root
            del self._by_hash[block_hash]
        after, before = self._next_sibling[block], self._previous_sibling[block]
        if before == NONE:
            self.first_child[parent] = after
        else:
            self._next_sibling[before] = after
        if after != NONE:
            self._previous_sibling[after] = before
        self.parents[block] = NONE
        if parent >= self.num_blocks and after == NONE:
            self._forget_unused_root(parent)
        return parent

    def discard_chain(self, nodes: Sequence[int]) -> int:
        """Remove a node without children and then its ancestors, each the only child of the next. Returns the parent
        of the last.
        """
        hashes, by_hash, parents, first_child = self.hashes, self._by_hash, self.parents, self.first_child
        for position in range(len(nodes) - 1):
            node, parent = nodes[position], nodes[position + 1]
            block_hash = hashes[node]
            if block_hash is None:
                del self._tails[parent, self.contents[node]]
            elif by_hash.get(block_hash) == node:  # not so below a detached root
                del by_hash[block_hash]
            parents[node] = first_child[parent] = NONE
        return self.discard(nodes[-1])


def common_tokens(first: bytes, second: bytes) -> int:
    """Count the leading tokens that two packed runs of ids have in common."""
    shorter = min(len(first), len(second))
    difference = int.from_bytes(first[:shorter], "little") ^ int.from_bytes(second[:shorter], "little")
    if not difference:
        return shorter // 4
    # The lowest bit that is set lies in the first token that differs.
    return ((difference & -difference).bit_length() - 1) // _BITS_PER_TOKEN
