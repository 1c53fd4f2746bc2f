"""A paged model's keys and values in pools of blocks.

One pool serves the layers that keep all tokens, and one those of each ring buffer. Slots of the latter free the blocks
that no window reaches. Models read each pool through its own inputs (`of_ring`). A row's blocks begin with the first
that it still holds, and its past counts from there, because attention depends only on token distances. The number of
blocks follows from the slots, or from the space given (VLLM_OPENVINO_KVCACHE_SPACE).

Each recurrent state is in the table that OpenVINO's operators read and write, one row per slot:

    layout    a row of the table    of a state `shape`
    conv      [C, K]                [K − 1, C], the tokens before a step, after a column that is not read
    delta     [H, Dv, Dk]           [H, Dk, Dv]
    scan      [H, P, N]             the same
    columns   [N, C]                [C, 1, N]

After the rows of slots come a row of zeros, with which rows without a past begin, and rows that no slot owns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmc.errors import DeviceError, InputError
from llmc.runtime.executors.openvino.blocks import BLOCK, BlockCache, Floats, block_bytes, cache_names, rings_of
from llmc.runtime.executors.slots import SlotLengths, sparse_bytes
from llmc.runtime.host import available_memory

if TYPE_CHECKING:
    from llmc.runtime.cache_shape import CacheShape, CacheTensor


GIB = 1 << 30
Ints = NDArray[np.int32]
Longs = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """Inputs that locate the tokens of B rows in a pool.

    past [B]: tokens of each row in the pool; begins [B + 1]: where each row's blocks begin in `blocks`; longest []:
    tokens of the longest row including its new ones.
    """

    past: Ints
    blocks: Ints
    begins: Ints
    longest: Ints

    @classmethod
    def of(cls, tables: Sequence[Sequence[int]], firsts: Sequence[int], past: Longs, new: Longs) -> RowBlocks:
        """Create from each row's block table, and the index of the table's first block in its row."""
        there = past - np.array(firsts, np.int64) * BLOCK
        total = there + new
        counts = -(-total // BLOCK)
        begins = np.zeros(len(new) + 1, np.int32)
        np.cumsum(counts, out=begins[1:])
        blocks = [np.array(table[:count], np.int32) for table, count in zip(tables, counts.tolist(), strict=True)]
        return cls(there.astype(np.int32), np.concatenate(blocks), begins, np.array(total.max(), np.int32))

    @classmethod
    def none(cls) -> RowBlocks:
        ints = np.zeros(0, np.int32)
        return cls(ints, ints, np.zeros(1, np.int32), np.array(1, np.int32))

    def filled(self, more: int, block: int) -> RowBlocks:
        ints, ones = np.zeros(more, np.int32), np.arange(1, more + 1, dtype=np.int32)
        return RowBlocks(
            np.append(self.past, ints), np.append(self.blocks, ints + np.int32(block)),
            np.append(self.begins, self.begins[-1] + ones), self.longest,
        )  # fmt: skip

    @property
    def tables(self) -> Ints:
        """[B, M]: the blocks of each row, followed by arbitrary ones."""
        counts = np.diff(self.begins)
        tables = np.zeros((len(counts), int(counts.max())), np.int32)
        tables[np.arange(tables.shape[1]) < counts[:, None]] = self.blocks
        return tables


@dataclass(frozen=True, slots=True)
class StepRows:
    """The model's inputs for one step (named in compiler/targets/openvino/paged.py); T tokens of B rows.

    token_ids, positions [T] int64; begins [B + 1] int32, where each row's tokens begin; slots [B] int32; adapters [B]
    int64 by row; pools: row locations in each pool of the cache, of which the first has all tokens.
    """

    token_ids: Longs
    positions: Longs
    begins: Ints
    slots: Ints
    adapters: Longs
    pools: Sequence[RowBlocks]

    @classmethod
    def of(
        cls, token_ids: Longs, past: Longs, new: Longs, slots: Sequence[int], adapters: Longs,
        pools: Sequence[RowBlocks],
    ) -> StepRows:  # fmt: skip
        """Create from padded token_ids [B, Q] of which row i has new[i] live ones."""
        begins = np.zeros(len(new) + 1, np.int32)
        np.cumsum(new, out=begins[1:])
        if token_ids.shape[1] == 1:
            flat, positions = token_ids.reshape(-1), past
        else:
            flat = token_ids[np.arange(token_ids.shape[1]) < new[:, None]]
            positions = np.arange(begins[-1]) + np.repeat(past - begins[:-1], new)
        return cls(
            np.ascontiguousarray(flat), np.ascontiguousarray(positions, np.int64), begins, np.array(slots, np.int32),
            adapters, pools,
        )  # fmt: skip

    @classmethod
    def none(cls, pools: int) -> StepRows:
        longs, ints = np.zeros(0, np.int64), np.zeros(0, np.int32)
        return cls(longs, longs, np.zeros(1, np.int32), ints, longs, [RowBlocks.none()] * pools)

    @property
    def past(self) -> Ints:
        return self.pools[0].past

    @property
    def ends(self) -> Longs:
        """Index of each row's last token."""
        return self.begins[1:].astype(np.int64) - 1

    def filled(self, rows: int, blocks: Sequence[int], slot: int) -> tuple[StepRows, Longs]:
        """Append one-token rows up to `rows`, in one of `blocks` of each pool, and with states from `slot` on.

        Also returns each row's last token.
        """
        more = rows - len(self.past)
        if not more:
            return self, self.ends
        longs, ones = np.zeros(more, np.int64), np.arange(1, more + 1, dtype=np.int32)
        built = StepRows(
            np.append(self.token_ids, longs), np.append(self.positions, longs),
            np.append(self.begins, self.begins[-1] + ones), np.append(self.slots, np.int32(slot - 1) + ones),
            np.append(self.adapters, longs),
            [pool.filled(more, block) for pool, block in zip(self.pools, blocks, strict=True)],
        )  # fmt: skip
        return built, built.ends


class BlockTables:
    """`slots` tables over `blocks` blocks: the blocks `tables[slot]` hold tokens `firsts[slot] · BLOCK` and on.

    With a `ring`, a slot frees blocks whose tokens are further behind its last. `copy(source, target)` copies a block's
    contents; `taken(block)` is called for a block that was free.
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
        return len(self._free)

    def prepare(self, slot: int, start: int, end: int, begin: int = 0) -> None:
        """Let slot `slot` keep its first `start` tokens and write up to `end`; `written` confirms the write.

        A slot that keeps none writes from `begin` on. Blocks that are only overwritten are freed or reused; a shared
        block is copied before it is written. Raises InputError if the pool has no free block left.
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
        if self._ring is not None:
            gone = max(0, (end - self._ring) // BLOCK - self.firsts[slot])
            for block in self.tables[slot][:gone]:
                self._release(block)
            del self.tables[slot][:gone]
            self.firsts[slot] += gone

    def share(self, source: int, target: int, length: int) -> None:
        """Make the first `length` tokens of `source`, or all it has, the content of `target`, in the same blocks."""
        first = self.firsts[source] if length else 0
        kept = self.tables[source][: max(0, -(-length // BLOCK) - first)]
        for block in kept:
            self._holders[block] += 1
        self._cut(self.tables[target], 0)
        self.tables[target], self.firsts[target] = kept, first

    def _cut(self, table: list[int], length: int) -> None:
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


class BlockPool:
    """The tensors `kept`, called `names` in models, of layers with one `ring`, or of those without one (None)."""

    def __init__(
        self, ring: int | None, names: Sequence[str], kept: Sequence[CacheTensor], precision: str, slots: int,
        blocks: int,
    ) -> None:  # fmt: skip
        self.ring = ring
        self.names, self.kept = names, kept
        self.cache = BlockCache(precision, kept, blocks + 1)
        self.blocks = blocks
        self.filler = blocks
        """A block that no slot owns."""
        self.tables = BlockTables(slots, blocks, self.cache.copy, self._nan_fill_taken, ring)
        self._nan_filled: float | None = None

    def read(self, slot: int, length: int) -> list[Floats]:
        """Zeros before a ring's window."""
        begin = self.tables.firsts[slot] * BLOCK
        found = self.cache.read(self.tables.tables[slot], max(0, length - begin))
        if self.ring is None:
            return found
        whole = []
        for t, tokens in zip(self.kept, found, strict=True):
            seen = t.seen(length)
            whole.append(np.zeros((t.shape[0], length, t.shape[1]), np.float32))
            whole[-1][:, seen.start :] = tokens[:, seen.start - begin :]
        return whole

    def write(self, slot: int, length: int, tensors: Sequence[Floats]) -> None:
        self.tables.prepare(slot, 0, length, 0 if self.ring is None else max(0, length - self.ring))
        begin = self.tables.firsts[slot] * BLOCK
        self.cache.write(self.tables.tables[slot], [tensor[:, begin:] for tensor in tensors])
        self.tables.written(slot, length)

    def nan_fill(self, slot: int, kept: int, value: float) -> None:
        self.tables.prepare(slot, kept, kept)
        if kept % BLOCK:  # prepare one more token, so that the slot owns its last block
            self.tables.prepare(slot, kept, kept + 1)
            self.cache.nan_fill(self.tables.tables[slot], kept - self.tables.firsts[slot] * BLOCK, value)
        self.cache.nan_fill([self.filler], 0, value)
        self._nan_filled = value

    def _nan_fill_taken(self, block: int) -> None:
        if self._nan_filled is not None:
            self.cache.nan_fill([block], 0, self._nan_filled)


class PagedCache:
    """The cache of `shape` for `slots` sequences of `capacity` tokens, or as many as `space` GiB hold.

    Raises InputError or DeviceError if that is none.
    """

    def __init__(
        self, precision: str, shape: CacheShape, slots: int, capacity: int, space: float | None = None
    ) -> None:
        self.precision = precision
        self.held = SlotLengths(slots, shape.rewind)
        names, self._kv = cache_names(shape), shape.kv
        parts = {ring: [i for i, t in enumerate(self._kv) if t.ring == ring] for ring in (None, *rings_of(self._kv))}
        self._order = [i for part in parts.values() for i in part]
        room, most = pool_blocks(precision, self._kv, slots, capacity, space), slots * -(-capacity // BLOCK)
        self.shared = room < most
        """Whether slots may need more than there is."""
        self.pools = [
            BlockPool(
                ring, [names[i] for i in part], [self._kv[i] for i in part], precision, slots,
                room if ring is None else most,
            )
            for ring, part in parts.items()
        ]  # fmt: skip
        usual = [room, *(slots * ring_blocks(ring, capacity) for ring in rings_of(self._kv))]
        self.nbytes = sum(n * pool.cache.block_bytes for n, pool in zip(usual, self.pools, strict=True))
        """Blocks that all slots hold between steps."""

    @property
    def tokens(self) -> int:
        """Number of tokens for which there is room in all slots together."""
        return self.pools[0].blocks * BLOCK

    def prepare(self, slot: int, start: int, end: int) -> None:
        for pool in self.pools:
            pool.tables.prepare(slot, start, end)
        self.held.wrote(slot, start, start)

    def written(self, slot: int, end: int) -> None:
        for pool in self.pools:
            pool.tables.written(slot, end)
        self.held.wrote(slot, self.held.used[slot], end)

    def share(self, source: int, target: int, length: int) -> None:
        """Raises InputError if `source` lacks these tokens."""
        self.held.require(source, length)
        for pool in self.pools:
            pool.tables.share(source, target, length)
        self.held.copied(source, target, length)

    def rows(self, slots: Sequence[int], past: Longs, new: Longs) -> list[RowBlocks]:
        tables = [pool.tables for pool in self.pools]
        return [RowBlocks.of([t.tables[s] for s in slots], [t.firsts[s] for s in slots], past, new) for t in tables]

    def read(self, slot: int, length: int) -> list[Floats]:
        """The first `length` tokens of a slot in float32, [heads, length, width]; zeros before a ring's window.

        Raises InputError if tokens are missing.
        """
        self.held.require(slot, length)
        found = [tensor for pool in self.pools for tensor in pool.read(slot, length)]
        return [found[self._order.index(i)] for i in range(len(found))]

    def write(self, slot: int, length: int, tensors: Sequence[Floats]) -> None:
        """Write `length` tokens to a slot, rounded to the cache's precision."""
        given = iter([tensors[i] for i in self._order])
        for pool in self.pools:
            pool.write(slot, length, [next(given) for _ in pool.kept])
        self.held.imported(slot, length)

    def nan_fill(self, slot: int, start: int, value: float) -> None:
        """Fill what the slot does not own of its last block, and every block taken from now on."""
        kept = min(start, self.held.used[slot])
        for pool in self.pools:
            pool.nan_fill(slot, kept, value)
        self.held.wrote(slot, kept, kept)

    @property
    def held_bytes(self) -> int:
        return sum((pool.blocks - pool.tables.free_blocks) * pool.cache.block_bytes for pool in self.pools)


def ring_blocks(ring: int, capacity: int) -> int:
    """Blocks of a ring buffer that a slot holds between steps. Its tokens may begin and end anywhere in a block."""
    return min(-(-ring // BLOCK) + 1, -(-capacity // BLOCK))


def pool_blocks(
    precision: str, kept: Sequence[CacheTensor], slots: int, capacity: int, space: float | None
) -> int:  # fmt: skip
    """Blocks of the tensors of `kept` that keep all tokens, for `slots` sequences of `capacity` tokens.

    With `space` GiB, as many as fit in addition to the others' ring buffers. Raises InputError for a space that fits no
    sequence, and DeviceError if this host lacks the memory; both state what would fit.
    """
    each = -(-capacity // BLOCK)
    wanted, size = slots * each, block_bytes(precision, [t for t in kept if t.ring is None])
    if not space or not block_bytes(precision, kept):
        return wanted
    rings = sum(
        slots * ring_blocks(ring, capacity) * block_bytes(precision, [t for t in kept if t.ring == ring])
        for ring in rings_of(kept)
    )
    given = int(space * GIB) - rings
    blocks = min(wanted, given // size if size else wanted)
    if given < 0 or blocks < 2:
        said = f"{BLOCK} tokens take {size:,} bytes" if size else "all layers have windows"
        if rings:
            said += f", rings of windows {rings / GIB:.3g} GiB for {slots} slots"
        raise InputError(
            f"VLLM_OPENVINO_KVCACHE_SPACE={space:g} GiB holds no sequence: {said}; "
            f"{(each * size + rings) / GIB:.3g} GiB hold one of {capacity} tokens, "
            f"{(wanted * size + rings) / GIB:.3g} GiB all {slots}"
        )
    available = available_memory()
    if available is not None and blocks * size + rings > available:
        raise DeviceError(
            f"VLLM_OPENVINO_KVCACHE_SPACE={space:g} GiB does not fit: {(blocks * size + rings) / GIB:.3g} GiB would be "
            f"used and {available / GIB:.3g} GiB of memory are free here; ask for at most {available / GIB * 0.9:.3g}"
        )
    return blocks


Shape = tuple[int, ...]


class _Layout(NamedTuple):
    """The shape of a row, and its conversions to and from a state."""

    row: Callable[[Shape], Shape]
    read: Callable[[Floats], Floats]
    written: Callable[[Floats], Floats]


def _with_column(state: Floats) -> Floats:
    return np.concatenate([np.zeros_like(state[:1]), state]).T


LAYOUTS: Mapping[str, _Layout] = {
    "conv": _Layout(lambda s: (s[1], s[0] + 1), lambda row: row[:, 1:].T, _with_column),
    "delta": _Layout(lambda s: (s[0], s[2], s[1]), lambda row: row.swapaxes(1, 2), lambda state: state.swapaxes(1, 2)),
    "scan": _Layout(lambda s: s, lambda row: row, lambda state: state),
    "columns": _Layout(lambda s: (s[2], s[0]), lambda row: row.T[:, None], lambda state: state[:, 0].T),
}
"""By name, as in model inputs: conv_state.0."""


def layouts_of(rows: Mapping[str, Shape], shape: CacheShape) -> list[str]:
    """The layout of each state, by the row shapes of the model inputs that are tables. Raises ValueError for others."""
    found = {name: name.partition("_state.")[0] for name in rows}
    layouts = [next((n for n in found if n.endswith(f"_state.{i}")), "") for i in range(len(shape.states))]
    wanted = {
        name: LAYOUTS[found[name]].row(t.shape)
        for name, t in zip(layouts, shape.states, strict=True)
        if found.get(name) in LAYOUTS
    }
    if wanted != rows or len(wanted) != len(shape.states):
        raise ValueError(f"tables {rows} are not of the states {[t.entry for t in shape.states]}")
    return [found[name] for name in layouts]


class StateTables:
    """The states `kept` of `slots` slots, in `layouts`, and `more` rows of no slot. Memory is allocated on write."""

    def __init__(self, kept: Sequence[CacheTensor], layouts: Sequence[str], slots: int, more: int) -> None:
        self._layouts = [LAYOUTS[name] for name in layouts]
        shapes = [layout.row(t.shape) for layout, t in zip(self._layouts, kept, strict=True)]
        self.tables: list[Floats] = [
            sparse_bytes(4 * (slots + 1 + more) * int(np.prod(shape))).view(np.float32).reshape(-1, *shape)
            for shape in shapes
        ]
        self.zeros = slots
        """The row that rows without a past read."""
        self.filler = slots + 1
        """The first row that no slot owns."""
        self.slot_bytes = sum(table[0].nbytes for table in self.tables)

    def copy(self, source: int, target: int) -> None:
        for table in self.tables:
            table[target] = table[source]

    def read(self, slot: int) -> list[Floats]:
        return [
            np.ascontiguousarray(layout.read(table[slot]))
            for layout, table in zip(self._layouts, self.tables, strict=True)
        ]

    def write(self, slot: int, states: Sequence[Floats]) -> None:
        for layout, table, state in zip(self._layouts, self.tables, states, strict=True):
            table[slot] = layout.written(state)

    def nan_fill(self, slot: int, value: float) -> None:
        for table in self.tables:
            table[slot] = value
            table[self.filler :] = value
