"""How far ahead a sequence looks, by how its drafts did."""

from __future__ import annotations

from array import array
from itertools import pairwise

from llmc.runtime.engine.speculation import LONGEST_PAUSE, SequenceDrafter, SpeculativeConfig

TEXT = array("q", [5, 6, 7] * 40)


def drafted(drafter: SequenceDrafter, most: int = 64) -> int:
    return len(drafter.propose(TEXT, most))


def test_as_many_as_allowed_at_first_and_never_more_than_requested() -> None:
    drafter = SequenceDrafter(SpeculativeConfig(8))
    assert (drafted(drafter), drafted(drafter, 3), drafted(drafter, 0)) == (8, 3, 0)


def test_half_as_many_after_a_draft_that_failed_and_twice_as_many_after_one_that_held() -> None:
    drafter = SequenceDrafter(SpeculativeConfig(8))
    found = []
    for held in (0, 0, 4, 1, 1, 2, 4, 8, 8):
        count = drafted(drafter)
        found.append(count)
        drafter.verified(len(TEXT), count, min(held, count))
    assert found == [8, 4, 2, 4, 4, 4, 4, 8, 8]


def test_guesses_that_always_fail_are_built_ever_more_seldom() -> None:
    drafter, text, built = SequenceDrafter(SpeculativeConfig(1)), array("q", TEXT), []
    for step in range(400):
        if drafter.propose(text, 9):
            built.append(step)
            drafter.verified(len(text) + 1, 1, 0)
        text.append(text[-3])
    gaps = [b - a for a, b in pairwise(built)]
    assert gaps[:5] == [3, 5, 9, 17, 33] and set(gaps[5:]) == {LONGEST_PAUSE + 1}
    drafter.verified(len(text), 1, 1)
    assert len(drafter.propose(text, 9)) == 0, "the pause goes to its end"
    text.extend(text[-3 * LONGEST_PAUSE :])
    assert len(drafter.propose(text, 9)) == 1
    drafter.verified(len(text), 1, 0)
    text.extend(text[-3:])
    assert len(drafter.propose(text, 9)) == 1, "one that held has ended the row of pauses"
