"""Which blocks each slot holds: block tables over a pool, blocks shared by reference count and copied on write."""

from __future__ import annotations

from collections.abc import Callable

from llmc.errors import InputError
from llmc.runtime.cache_shape import ANYWHERE, Rewind
from llmc.runtime.executors.held import Held
from llmc.runtime.executors.openvino.blocks import BLOCK


class BlockTables:
    """`slots` tables over `blocks` blocks.

    `copy(source, target)` copies a block's contents, `taken(block)` is told of a block that nobody held before.
    """

    def __init__(
        self, slots: int, blocks: int, copy: Callable[[int, int], None], taken: Callable[[int], None],
        rewind: Rewind = ANYWHERE,
    ) -> None:  # fmt: skip
        self.tables: list[list[int]] = [[] for _ in range(slots)]
        self.held = Held(slots, rewind)
        self._holders = [0] * blocks
        self._free = list(range(blocks - 1, -1, -1))
        self._copy = copy
        self._taken = taken

    @property
    def free_blocks(self) -> int:
        """Blocks that no slot holds."""
        return len(self._free)

    def prepare(self, slot: int, start: int, end: int) -> None:
        """Let slot `slot` keep its first `start` tokens and write up to `end`; `written` says that it did.

        Blocks that hold only what is written over are given back or reused; a shared one is copied before it is
        written. Raises InputError when the pool has no block left.
        """
        table = self.tables[slot]
        for block in table[-(-end // BLOCK) :]:
            self._release(block)
        del table[-(-end // BLOCK) :]
        for at in range(start // BLOCK, len(table)):
            if self._holders[table[at]] > 1:
                own = self._take()
                if at * BLOCK < start:
                    self._copy(table[at], own)
                self._release(table[at])
                table[at] = own
        while len(table) * BLOCK < end:
            table.append(self._take())
        self.held.wrote(slot, 0, start)

    def written(self, slot: int, end: int) -> None:
        """Slot `slot` holds tokens 0 … end − 1."""
        self.held.wrote(slot, 0, end)

    def share(self, source: int, target: int, length: int) -> None:
        """Make the first `length` tokens of `source` all that `target` holds, in the same blocks."""
        self.held.require(source, length)
        kept = self.tables[source][: -(-length // BLOCK)]
        for block in kept:
            self._holders[block] += 1
        for block in self.tables[target]:
            self._release(block)
        self.tables[target] = kept
        self.held.copied(source, target, length)

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
