"""Which blocks each slot holds: block tables over a pool, blocks shared by reference count and copied on write."""

from __future__ import annotations

from collections.abc import Callable

from llmc.errors import InputError
from llmc.runtime.executors.openvino.blocks import BLOCK


class BlockTables:
    """`slots` tables over `blocks` blocks: the blocks `tables[slot]` hold tokens `firsts[slot] · BLOCK` and on.

    With a `ring` a slot gives blocks back whose tokens are further behind its last. `copy(source, target)` copies a
    block's contents, `taken(block)` is told of a block that nobody held before.
    """

    def __init__(
        self, slots: int, blocks: int, copy: Callable[[int, int], None], taken: Callable[[int], None],
        ring: int | None = None,
    ) -> None:  # fmt: skip
        self.tables: list[list[int]] = [[] for _ in range(slots)]
        self.firsts = [0] * slots
        self._ring = ring
        self._holders = [0] * blocks
        self._free = list(range(blocks - 1, -1, -1))
        self._copy = copy
        self._taken = taken

    @property
    def free_blocks(self) -> int:
        """Blocks that no slot holds."""
        return len(self._free)

    def prepare(self, slot: int, start: int, end: int, begin: int = 0) -> None:
        """Let slot `slot` keep its first `start` tokens and write up to `end`; a slot that keeps none writes from
        `begin` on. `written` says that it did.

        Blocks that hold only what is written over are given back or reused; a shared one is copied before it is
        written. Raises InputError when the pool has no block left.
        """
        table = self.tables[slot]
        if not start and self.firsts[slot] != begin // BLOCK:
            self._cut(table, 0)
            self.firsts[slot] = begin // BLOCK
        first = self.firsts[slot]
        self._cut(table, -(-end // BLOCK) - first)
        for at in range(max(0, start // BLOCK - first), len(table)):
            if self._holders[table[at]] > 1:
                own = self._take()
                if (first + at) * BLOCK < start:
                    self._copy(table[at], own)
                self._release(table[at])
                table[at] = own
        while (first + len(table)) * BLOCK < end:
            table.append(self._take())

    def written(self, slot: int, end: int) -> None:
        """Slot `slot` holds tokens 0 … end − 1, or of these what the ring holds."""
        if self._ring is not None:
            gone = max(0, (end - self._ring) // BLOCK - self.firsts[slot])
            for block in self.tables[slot][:gone]:
                self._release(block)
            del self.tables[slot][:gone]
            self.firsts[slot] += gone

    def share(self, source: int, target: int, length: int) -> None:
        """Make the first `length` tokens of `source`, as far as it has them, all that `target` holds, in the same
        blocks."""
        first = self.firsts[source] if length else 0
        kept = self.tables[source][: max(0, -(-length // BLOCK) - first)]
        for block in kept:
            self._holders[block] += 1
        self._cut(self.tables[target], 0)
        self.tables[target], self.firsts[target] = kept, first

    def _cut(self, table: list[int], length: int) -> None:
        """Give back what is behind the first `length` blocks."""
        for block in table[max(0, length) :]:
            self._release(block)
        del table[max(0, length) :]

    def _take(self) -> int:
        if not self._free:
            raise InputError(
                f"the KV cache has no free block of its {len(self._holders)}; raise VLLM_OPENVINO_KVCACHE_SPACE, or "
                "serve fewer or shorter sequences at once"
            )
        block = self._free.pop()
        self._holders[block] = 1
        self._taken(block)
        return block

    def _release(self, block: int) -> None:
        self._holders[block] -= 1
        if not self._holders[block]:
            self._free.append(block)
