"""Block tables: who holds which block, whatever is written, shared and taken back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.errors import InputError
from llmc.runtime.executors.openvino.blocks import BLOCK
from llmc.runtime.executors.openvino.tables import BlockTables

SLOTS, BLOCKS = 4, 24


class Tables:
    """Tables over blocks whose contents are lists of tokens."""

    def __init__(self) -> None:
        self.contents: list[list[int | None]] = [[None] * BLOCK for _ in range(BLOCKS)]
        self.tables = BlockTables(SLOTS, BLOCKS, self._copy, lambda block: self.contents[block].__setitem__(0, None))

    def _copy(self, source: int, target: int) -> None:
        self.contents[target] = list(self.contents[source])

    def write(self, slot: int, start: int, tokens: list[int]) -> None:
        self.tables.prepare(slot, start, start + len(tokens))
        for at, token in enumerate(tokens, start):
            self.contents[self.tables.tables[slot][at // BLOCK]][at % BLOCK] = token
        self.tables.written(slot, start + len(tokens))

    def read(self, slot: int) -> list[int | None]:
        table = self.tables.tables[slot]
        return [self.contents[table[at // BLOCK]][at % BLOCK] for at in range(self.tables.held.used[slot])]


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_every_slot_keeps_its_own_tokens_and_no_block_is_lost(data: st.DataObject) -> None:
    tables, held = Tables(), [[] for _ in range(SLOTS)]
    fresh = iter(range(10**9))
    for _ in range(data.draw(st.integers(1, 25))):
        slot = data.draw(st.integers(0, SLOTS - 1))
        if data.draw(st.booleans()):
            start = data.draw(st.integers(0, len(held[slot])))
            count = data.draw(st.integers(1, 40))
            if start + count > BLOCK * 5:
                continue
            tokens = [next(fresh) for _ in range(count)]
            tables.write(slot, start, tokens)
            held[slot] = held[slot][:start] + tokens
        else:
            target = data.draw(st.integers(0, SLOTS - 1))
            length = data.draw(st.integers(0, len(held[slot])))
            tables.tables.share(slot, target, length)
            held[target] = held[slot][:length]
        assert [tables.read(s) for s in range(SLOTS)] == held
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
    assert tables.read(0) == list(range(2 * BLOCK + 3))


def test_a_full_pool_and_a_slot_that_holds_less_say_so() -> None:
    tables = Tables()
    with pytest.raises(InputError, match="KV cache has no free block of its 24; raise VLLM_OPENVINO_KVCACHE_SPACE"):
        tables.tables.prepare(0, 0, (BLOCKS + 1) * BLOCK)
    with pytest.raises(InputError, match="slot 2 holds 0 tokens, not 1"):
        tables.tables.share(2, 3, 1)
