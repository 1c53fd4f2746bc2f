"""Finding the beginning of a prompt in the cache."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.runtime.engine.scheduling.queue import ScheduledSequence
from llmc.runtime.engine.scheduling.slots import Match, Retained, SlotTable, common_prefix, longest_match

tokens = st.lists(st.integers(0, 1), min_size=1, max_size=30)


@given(tokens, tokens, st.integers(0, 30))
def test_common_prefix_counts_equal_tokens_from_the_start(a: list[int], b: list[int], limit: int) -> None:
    limit = min(limit, len(a), len(b))
    expected = next((i for i in range(limit) if a[i] != b[i]), limit)
    assert common_prefix(np.array(a, np.int64), array("q", b), limit) == expected


def test_tokens_can_be_appended_after_matching() -> None:
    """A view of an array forbids to extend it."""
    slots, held = SlotTable(1, 1), sequence([1, 2, 3])
    slots.admit(held, None)
    held.cached = 3
    requested = sequence([1, 2, 3, 4])
    assert longest_match(slots, requested, within_group=False) == Match(0, 3, 0)
    held.tokens.append(4)
    requested.tokens.append(5)


def sequence(prompt: list[int], group: int | None = None) -> ScheduledSequence:
    return ScheduledSequence(0, array("q", prompt), len(prompt), 0, 0, group)


@pytest.fixture
def slots() -> SlotTable:
    """Slot 0: live, two of [7, 8, 9] cached. Slot 1: free. Slot 2: retains [1, 2, 3]. Slot 3: retains [1, 2]."""
    table = SlotTable(4, 1)
    live = sequence([7, 8, 9], group=5)
    table.admit(live, None)
    live.cached = 2
    table.retained[2] = Retained(array("q", [1, 2, 3, 4]), 3, 1)
    table.retained[3] = Retained(array("q", [1, 2]), 2, 2)
    return table


@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        ([1, 2, 3, 4, 5], (2, 3)),  # what is not cached does not count
        ([1, 2, 9], (2, 2)),  # the lower of equals
        ([1, 2, 3], (2, 2)),  # one token is left to compute
        ([7, 8, 9], (0, 2)),  # a live sequence
        ([7, 9], (0, 1)),
        ([9, 9], None),
        ([1], None),
    ],
)
def test_the_longest_match_wins(slots: SlotTable, prompt: list[int], found: tuple[int, int] | None) -> None:
    match = longest_match(slots, sequence(prompt), within_group=False)
    assert (match and match[:2]) == found


def test_within_a_group_only_its_live_sequences_count(slots: SlotTable) -> None:
    assert longest_match(slots, sequence([1, 2, 3], 5), within_group=True) is None
    assert longest_match(slots, sequence([7, 8, 9], 5), within_group=True) == Match(0, 2, 0)
    assert longest_match(slots, sequence([7, 8, 9], 6), within_group=True) is None
