"""Block tables: who holds which block, whatever is written, shared and taken back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.errors import InputError
from llmc.runtime.executors.openvino.blocks import BLOCK
from llmc.runtime.executors.openvino.paged_cache import BlockTables
from tests.tiers import default_cases, examples

SLOTS, BLOCKS = 4, 24


RING = 40


class Tables:
    """Tables over blocks whose contents are lists of tokens."""

    def __init__(self, ring: int | None = None) -> None:
        self.contents: list[list[int | None]] = [[None] * BLOCK for _ in range(BLOCKS)]
        self.tables = BlockTables(
            SLOTS, BLOCKS, self._copy, lambda block: self.contents[block].__setitem__(0, None), ring
        )

    def _copy(self, source: int, target: int) -> None:
        self.contents[target] = list(self.contents[source])

    def write(self, slot: int, start: int, tokens: list[int]) -> None:
        self.tables.prepare(slot, start, start + len(tokens))
        table, first = self.tables.tables[slot], self.tables.firsts[slot]
        for at, token in enumerate(tokens, start):
            self.contents[table[at // BLOCK - first]][at % BLOCK] = token
        self.tables.written(slot, start + len(tokens))

    def read(self, slot: int, begin: int, end: int) -> list[int | None]:
        table, first = self.tables.tables[slot], self.tables.firsts[slot]
        return [self.contents[table[at // BLOCK - first]][at % BLOCK] for at in range(begin, end)]


@default_cases(1)
@pytest.mark.parametrize("ring", [None, RING])
@given(data=st.data())
@examples(150)
def test_every_slot_keeps_its_own_tokens_and_no_block_is_lost(ring: int | None, data: st.DataObject) -> None:
    """`begins`: what a ring has forgotten of each slot."""
    tables, held = Tables(ring), [list[int]() for _ in range(SLOTS)]
    begins = [0] * SLOTS
    fresh = iter(range(10**9))
    for _ in range(data.draw(st.integers(1, 25))):
        slot = data.draw(st.integers(0, SLOTS - 1))
        if data.draw(st.booleans()):
            start = data.draw(st.integers(begins[slot], len(held[slot])) | st.just(0))
            count = data.draw(st.integers(1, 40))
            if start + count > BLOCK * 5:
                continue
            tokens = [next(fresh) for _ in range(count)]
            tables.write(slot, start, tokens)
            held[slot] = held[slot][:start] + tokens
            begins[slot] = max(begins[slot] if start else 0, len(held[slot]) - ring if ring else 0)
        else:
            target = data.draw(st.integers(0, SLOTS - 1))
            length = data.draw(st.integers(begins[slot], len(held[slot])) | st.just(0))
            tables.tables.share(slot, target, length)
            held[target], begins[target] = held[slot][:length], begins[slot] if length else 0
        for s, (begin, text) in enumerate(zip(begins, held, strict=True)):
            assert tables.read(s, begin, len(text)) == text[begin:]
            assert ring is None or len(tables.tables.tables[s]) <= ring // BLOCK + 2
    used = {block for table in tables.tables.tables for block in table}
    assert len(used) + tables.tables.free_blocks == BLOCKS
    for slot in range(SLOTS):
        tables.tables.share(slot, slot, 0)
    assert tables.tables.free_blocks == BLOCKS


def test_a_shared_prefix_takes_no_block_until_one_writes() -> None:
    tables = Tables()
    tables.write(0, 0, list(range(2 * BLOCK + 3)))
    free = tables.tables.free_blocks
    tables.tables.share(0, 1, 2 * BLOCK + 3)
    assert tables.tables.free_blocks == free
    tables.write(1, 2 * BLOCK + 3, [7])
    assert tables.tables.free_blocks == free - 1, "only the block that is written was copied"
    assert tables.read(0, 0, 2 * BLOCK + 3) == list(range(2 * BLOCK + 3))


def test_a_slot_may_begin_where_its_ring_does() -> None:
    tables = Tables(RING)
    tables.tables.prepare(0, 0, 4 * BLOCK + 1, 3 * BLOCK - 1)
    assert (tables.tables.firsts[0], len(tables.tables.tables[0])) == (2, 3)
    tables.tables.written(0, 4 * BLOCK + 1)
    assert (tables.tables.firsts[0], len(tables.tables.tables[0])) == (2, 3)
    tables.tables.prepare(0, 0, 1)
    assert (tables.tables.firsts[0], len(tables.tables.tables[0])) == (0, 1)


def test_a_full_pool_says_so() -> None:
    tables = Tables()
    with pytest.raises(InputError, match="KV cache has no free block of its 24; raise VLLM_OPENVINO_KVCACHE_SPACE"):
        tables.tables.prepare(0, 0, (BLOCKS + 1) * BLOCK)
