"""Which nodes are being computed right now, so that an equal prompt can wait for them instead of computing them too."""

from prefixgate.cache.block_table import BlockTable


class InFlight:
    """The next node of each table that is being prefilled.

    A node is known by (parent node, packed ids): content, not hash, so a collision cannot make a call wait for
    another's block. One entry for each table is enough: whoever asks has matched up to the published blocks, and of
    what is missing the first node is the leader's next, or is not being computed.
    """

    def __init__(self) -> None:
        # By node, in order of arrival: where the first ends early, the next one leads.
        self._tables: dict[tuple[int, bytes], dict[BlockTable, None]] = {}

    def leader(self, parent: int, content: bytes) -> BlockTable | None:
        """The table that computes the node, or None."""
        return next(iter(self._tables.get((parent, content), ())), None)

    def advance(self, table: BlockTable) -> None:
        """Register the first block of the table's prompt that is not published, in place of the one before."""
        self.leave(table)
        position = table.num_published
        if table.publishable and position < len(table.contents):
            parent = table.block_ids[position - 1] if position else table.root
            table.frontier = (parent, table.contents[position])
            self._tables.setdefault(table.frontier, {})[table] = None

    def leave(self, table: BlockTable) -> None:
        """Forget the table: it ended, or has nothing more that others could wait for."""
        if table.frontier is not None:
            tables = self._tables[table.frontier]
            del tables[table]
            if not tables:
                del self._tables[table.frontier]
            table.frontier = None

    def __len__(self) -> int:
        return len(self._tables)
