"""The worked example of docs/cache.md, run on the real cache: its table, and a check of every slot."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from prefixgate.cache.block_table import BlockTable
from prefixgate.cache.copy_plan import Copy, CopyPlan
from prefixgate.cache.hashing import BLOCK_SIZE, BlockHasher, CacheScope
from prefixgate.cache.prefix_cache import PrefixCache

POOL = 8
SCOPE = CacheScope("tenant", "model@1")

SYSTEM, A, B, B_SECOND, TWINS, COLD = range(6)
"""Whose text a token is: its id, divided by 100."""
ORIGINS = ("system prompt", "A", "B, and its 1st output", "B's 2nd output", "C and D")


def words(origin: int, count: int, first: int = 0) -> list[int]:
    """Token ids that tell where they come from."""
    return [origin * 100 + number for number in range(first, first + count)]


class Snapshot(NamedTuple):
    """The cache after one step of the story."""

    story: str
    tables: dict[str, list[int]]
    tree: str
    refs: list[str]
    """References of each block; "-" for a free one."""
    slots: list[list[int | None]]
    copies: list[Copy]
    """Planned, not run yet."""
    evictable: list[int]
    """Next to go first."""

    def row(self, number: int) -> str:
        """The step as a row of the page's table."""
        groups: dict[tuple[int, ...], list[str]] = {}
        for name, blocks in self.tables.items():
            groups.setdefault(tuple(blocks), []).append(name)
        tables = "<br>".join(f"{', '.join(names)}: {' '.join(map(str, b))}" for b, names in groups.items()) or "none"
        tree, refs, leaves = (f"`{cell}`" if cell else "" for cell in (self.tree, " ".join(self.refs), self.leaves))
        return f"| {number} | {self.story} | {tables} | {tree} | {refs} | {leaves} |"

    @property
    def leaves(self) -> str:
        return " ".join(map(str, self.evictable))


@dataclass(eq=False, slots=True)
class Sequence:
    """A table with the number of its slots that are written."""

    table: BlockTable
    written: int


class Example:
    """The story: a real cache, and a pool whose slots hold the ids of the tokens that were computed into them."""

    def __init__(self) -> None:
        self.cache = PrefixCache(POOL, BlockHasher(b"the example's key"))
        self.slots: list[list[int | None]] = [[None] * BLOCK_SIZE for _ in range(POOL)]
        self.live: dict[str, Sequence] = {}

    def steps(self) -> Iterator[Snapshot]:
        """Tell the story. Each snapshot is of the cache as it stands when the step is over."""
        prompt = words(SYSTEM, 40) + words(A, 6)
        self.admit("A", prompt, new=8)
        yield self.snapshot("A arrives, 46 tokens, up to 8 new ones: 3 blocks taken, 1 promised")
        self.compute("A")
        yield self.snapshot("A's prompt is computed; its two full blocks are published")
        self.decode("A", words(A, 3, 6))
        yield self.snapshot("A computes 3 of its tokens: block 2 fills and is published, block 3 begins")

        self.admit("B1", words(SYSTEM, 40) + words(B, 10), new=3, outputs=2)
        yield self.snapshot("B arrives, 50 tokens, 2 outputs: hits 0 and 1, leaves the tree 8 tokens into block 2")
        self.compute("B1")
        self.live["B2"] = self.fork("B1")
        yield self.snapshot("The copy has run, B's prompt is computed, block 4 is published; the second output forks")
        self.grow("B1", B * 100 + 10)
        self.grow("B2", B_SECOND * 100)
        yield self.snapshot("Both outputs write token 50: B1 finds block 5 shared and gets 6, then B2 has 5 alone")
        self.run_step("B1", "B2")
        yield self.snapshot("The step: copies, then the forward pass; the source is released")

        self.decode("A", words(A, 4, 9))
        self.end("A", unwritten=A * 100 + 13)
        yield self.snapshot("A ends after 53 slots; its last block stays as a tail of 5 tokens")
        self.admit("A'", prompt + words(A, 8, 6) + words(A, 6, 20), new=5)
        yield self.snapshot("A's next turn, 60 tokens: hits 0, 1, 2 and claims the tail; 53 tokens are there")
        self.compute("A'")
        self.decode("B1", [B * 100 + 11])
        self.decode("B2", [B_SECOND * 100 + 1])
        self.end("B1", unwritten=B * 100 + 12)
        self.end("B2", unwritten=B_SECOND * 100 + 2)
        yield self.snapshot("Both outputs of B end: two tails below block 4")

        self.admit("C", words(TWINS, 20), new=1)
        self.admit("D", words(TWINS, 20), new=1)
        yield self.snapshot("C and D, equal and cold: 7 was free; evicted are 6, then 5, and only then 4 above them")
        self.run_step("C", "D")
        yield self.snapshot("C publishes 6; D finds that node there, moves to it and frees its twin, 4")
        self.end("C")
        self.end("D")
        yield self.snapshot("C and D end: C's tail stays, D's says the same and does not")
        self.decode("A'", words(A, 4, 26))
        self.end("A'", unwritten=A * 100 + 30)
        yield self.snapshot("A' ends with a full block: nobody holds anything, everything can be hit")
        self.admit("E", words(COLD, 80), new=1)
        yield self.snapshot(
            "E, cold, 5 blocks: 4 and 5 were free; evicted are 7, 6, 3, the least recent leaves in turn"
        )

    # What an engine does

    def admit(self, name: str, prompt: list[int], *, new: int, outputs: int = 1) -> None:
        admission = self.cache.admit(SCOPE, list(prompt), max_new_tokens=new, outputs=outputs)
        assert admission is not None
        self.live[name] = Sequence(admission.table, admission.cached_tokens)

    def fork(self, name: str) -> Sequence:
        source = self.live[name]
        return Sequence(self.cache.fork(source.table, list(source.table.token_ids)), source.written)

    def grow(self, name: str, token: int) -> None:
        """Append a sampled token and make its slot writable."""
        live = self.live[name]
        live.table.token_ids.append(token)
        self.cache.writable(live.table, live.written, len(live.table.token_ids))

    def compute(self, name: str) -> None:
        live = self.live[name]
        self.cache.writable(live.table, live.written, len(live.table.token_ids))
        self.run_step(name)

    def decode(self, name: str, tokens: list[int]) -> None:
        for token in tokens:
            self.grow(name, token)
            self.run_step(name)

    def run_step(self, *names: str) -> None:
        """Copies, forward pass, publishing."""
        self.cache.run_plan(self._copy)
        for name in names:
            table, written = self.live[name].table, self.live[name].written
            for position in range(written, len(table.token_ids)):
                self.slots[table.block_ids[position // BLOCK_SIZE]][position % BLOCK_SIZE] = table.token_ids[position]
            self.live[name].written = len(table.token_ids)
        for name in names:
            self.cache.publish(self.live[name].table, self.live[name].written)

    def end(self, name: str, *, unwritten: int | None = None) -> None:
        """Release; ``unwritten`` is the token sampled last, which is never computed."""
        live = self.live.pop(name)
        if unwritten is not None:
            live.table.token_ids.append(unwritten)
        self.cache.release(live.table, live.written)

    def _copy(self, plan: CopyPlan) -> None:
        for block in plan.fresh:
            self.slots[block] = [None] * BLOCK_SIZE
        for source, destination, tokens in plan.copies:
            self.slots[destination][:tokens] = self.slots[source][:tokens]

    # What it looks like

    def snapshot(self, story: str) -> Snapshot:
        self.check()
        cache = self.cache
        free = set(cache.pool.free_blocks())
        refs = ["-" if block in free else str(count) for block, count in enumerate(cache.pool.ref_counts)]
        tables = {name: list(live.table.block_ids) for name, live in self.live.items()}
        roots = [self.branch(root) for root in cache.index.roots()]
        return Snapshot(
            story,
            tables,
            tree=" ".join(roots),
            refs=refs,
            slots=self.written_slots(),
            copies=cache.planned_copies(),
            evictable=cache.evictor.order(cache.accounts.of(SCOPE.tenant)),
        )

    def written_slots(self) -> list[list[int | None]]:
        """The pool without what is left in it from before: only slots that a table or a node vouches for."""
        index = self.cache.index
        shown: list[list[int | None]] = [[None] * BLOCK_SIZE for _ in range(POOL)]
        pending = {copy.dst for copy in self.cache.planned_copies()}
        vouched = {block: len(index.contents[block]) // 4 for root in index.roots() for block in index.walk(root)}
        for live in self.live.values():
            for position, block in enumerate(live.table.block_ids):
                vouched[block] = max(0, min(BLOCK_SIZE, live.written - position * BLOCK_SIZE))
        for block, tokens in vouched.items():
            if block not in pending:
                shown[block][:tokens] = self.slots[block][:tokens]
        return shown

    def branch(self, node: int) -> str:
        """Children in order of their numbers, each with its own in brackets; "~" marks a tail."""
        index = self.cache.index
        below = [
            f"{child}{'~' if index.is_tail(child) else ''}{f'({inner})' if (inner := self.branch(child)) else ''}"
            for child in sorted(index.children(node))
        ]
        return " ".join(below)

    def check(self) -> None:
        """Every written slot that a table names holds that table's token, but for copies that are still to run."""
        self.cache.check_integrity()
        pending = {copy.dst for copy in self.cache.planned_copies()}
        for name, live in self.live.items():
            for position in range(live.written):
                block = live.table.block_ids[position // BLOCK_SIZE]
                if block not in pending and self.slots[block][position % BLOCK_SIZE] != live.table.token_ids[position]:
                    raise AssertionError(f"{name}: position {position} in block {block}")


def rows(snapshots: list[Snapshot]) -> str:
    """The page's table."""
    head = [
        "| step | what happens | tables | tree | references of blocks 0 to 7 | evictable |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join([*head, *(snapshot.row(number) for number, snapshot in enumerate(snapshots, 1))])
