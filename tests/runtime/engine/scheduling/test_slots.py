"""Which slot holds what, and the copies in between."""

from __future__ import annotations

from array import array

from llmc.runtime.engine.scheduling.queue import ScheduledSequence
from llmc.runtime.engine.scheduling.slots import Copy, Prefix, Retained, SlotTable


def table(*holds: str | int, least: int = 1) -> tuple[SlotTable, dict[str, ScheduledSequence]]:
    """Slots in order: "" free, an int retained with that time of last use, a name a live sequence with 10 tokens
    cached, or none if the name ends in "?"."""
    slots, named = SlotTable(len(holds), least), {}
    for slot, what in enumerate(holds):
        if isinstance(what, int):
            slots.retained[slot] = Retained(array("q", range(20)), 20, what)
            slots._clock = max(slots._clock, what)
        elif what:
            sequence = ScheduledSequence(slot, array("q", range(11)), 11, 0, 0, slot=slot)
            sequence.cached = 0 if what.endswith("?") else 10
            slots.live[slot] = named[what] = sequence
    return slots, named


def new() -> ScheduledSequence:
    return ScheduledSequence(99, array("q", range(30)), 30, 0, 0)


def kept(slots: SlotTable) -> list[int | None]:
    return [None if held is None else held.used for held in slots.retained]


class TestArrange:
    def test_the_last_fills_a_hole(self) -> None:
        slots, s = table("a", "", "c", "d", "")
        assert slots.arrange([s["a"], s["c"], s["d"]]) == [s["a"], s["d"], s["c"]]
        assert slots.take_copies() == (Copy(3, 1, 10),)

    def test_in_place_needs_no_copy(self) -> None:
        slots, s = table("a", "b", "p")
        assert slots.arrange([s["b"], s["a"]]) == [s["a"], s["b"]]
        assert slots.take_copies() == ()

    def test_a_prompt_in_the_way_moves_out_first(self) -> None:
        slots, s = table("p", "a", "", "")
        assert slots.arrange([s["a"]]) == [s["a"]]
        assert slots.take_copies() == (Copy(0, 2, 10), Copy(1, 0, 10))
        assert (s["p"].slot, slots.live[2]) == (2, s["p"])

    def test_a_prompt_that_has_not_begun_moves_without_a_copy(self) -> None:
        slots, s = table("p?", "a")
        assert slots.arrange([s["a"]]) == [s["a"]]
        assert slots.take_copies() == (Copy(1, 0, 10),)
        assert (s["p?"].slot, slots.live[1]) == (1, s["p?"])

    def test_retained_tokens_move_to_a_free_slot(self) -> None:
        slots, s = table(5, "a", "", "")
        slots.arrange([s["a"]])
        assert slots.take_copies() == (Copy(0, 3, 20), Copy(1, 0, 10))
        assert kept(slots) == [None, None, None, 5]

    def test_retained_tokens_move_over_older_ones(self) -> None:
        slots, s = table(5, "a", 4, 3)
        slots.arrange([s["a"]])
        assert slots.take_copies() == (Copy(0, 3, 20), Copy(1, 0, 10))
        assert kept(slots) == [None, None, 4, 5]

    def test_the_oldest_retained_tokens_are_dropped(self) -> None:
        slots, s = table(2, "a", 4, 3)
        slots.arrange([s["a"]])
        assert slots.take_copies() == (Copy(1, 0, 10),)
        assert kept(slots) == [None, None, 4, 3]

    def test_a_prompt_in_the_way_evicts_the_oldest_retained_tokens(self) -> None:
        slots, s = table("p", "a", 4, 3)
        slots.arrange([s["a"]])
        assert slots.take_copies() == (Copy(0, 3, 10), Copy(1, 0, 10))
        assert kept(slots) == [None, None, 4, None]

    def test_a_slot_that_becomes_free_lets_the_next_prompt_out(self) -> None:
        slots, s = table("p", "", "a", "b")
        assert slots.arrange([s["a"], s["b"]]) == [s["b"], s["a"]]
        assert slots.take_copies() == (Copy(2, 1, 10), Copy(0, 2, 10), Copy(3, 0, 10))
        assert s["p"].slot == 2

    def test_when_every_slot_is_live_those_above_a_begun_prompt_wait(self) -> None:
        slots, s = table("a", "p", "b", "c")
        assert slots.arrange([s["a"], s["b"], s["c"]]) == [s["a"]]
        assert slots.take_copies() == ()
        slots, s = table("p", "a")
        assert slots.placeable([s["a"]]) == []


class TestAdmit:
    def test_takes_the_lowest_slot_without_a_live_sequence(self) -> None:
        slots, _ = table("a", "p", "", "q", "")
        sequence = new()
        slots.admit(sequence, None)
        assert (sequence.slot, sequence.cached, slots.take_copies()) == (2, 0, ())

    def test_moves_retained_tokens_out_of_its_way(self) -> None:
        slots, _ = table(1, 2, "")
        slots.admit(new(), None)
        assert slots.take_copies() == (Copy(0, 2, 20),)
        assert kept(slots) == [None, 2, 1]

    def test_drops_the_least_recently_used_when_there_is_no_free_slot(self) -> None:
        slots, _ = table(7, 5, 6)
        slots.admit(new(), None)
        assert slots.take_copies() == (Copy(0, 1, 20),)
        assert kept(slots) == [None, 7, 6]

    def test_copies_a_prefix_and_keeps_what_it_was_part_of(self) -> None:
        slots, _ = table("", 5)
        sequence = new()
        slots.admit(sequence, Prefix(1, 12, whole=False))
        assert slots.take_copies() == (Copy(1, 0, 12),)
        assert (sequence.slot, sequence.cached, kept(slots)) == (0, 12, [None, 6])

    def test_copies_a_live_sequences_prefix(self) -> None:
        slots, _ = table("a", "")
        slots.admit(new(), Prefix(0, 9, whole=False))
        assert slots.take_copies() == (Copy(0, 1, 9),)

    def test_a_prefix_that_is_all_of_what_was_retained_moves(self) -> None:
        slots, _ = table("", 5)
        slots.admit(new(), Prefix(1, 20, whole=True))
        assert slots.take_copies() == (Copy(1, 0, 20),)
        assert kept(slots) == [None, None]

    def test_takes_over_in_place(self) -> None:
        slots, _ = table(5, "")
        sequence = new()
        slots.admit(sequence, Prefix(0, 20, whole=True))
        assert slots.take_copies() == ()
        assert (sequence.slot, sequence.cached, kept(slots)) == (0, 20, [None, None])

    def test_takes_over_a_part_in_place_and_keeps_the_whole_elsewhere_if_it_can(self) -> None:
        slots, _ = table(5, "")
        slots.admit(new(), Prefix(0, 12, whole=False))
        assert (slots.take_copies(), kept(slots)) == ((Copy(0, 1, 20),), [None, 6])
        slots, _ = table(5, "a")
        slots.admit(new(), Prefix(0, 12, whole=False))
        assert (slots.take_copies(), kept(slots)) == ((), [None, None])

    def test_never_evicts_the_prefix_that_it_takes(self) -> None:
        slots, _ = table(7, 1)
        slots.admit(new(), Prefix(1, 12, whole=False))
        assert (slots.take_copies(), kept(slots)) == ((Copy(1, 0, 12),), [None, 8])


def test_an_ended_sequence_is_retained_from_the_least_length_on() -> None:
    for least, expected in ((0, [None]), (10, [1]), (11, [None])):
        slots, s = table("a", least=least)
        slots.retire(s["a"])
        assert kept(slots) == expected
        assert slots.live == [None]
