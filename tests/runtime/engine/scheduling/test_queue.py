"""The order in which waiting sequences get a slot."""

from __future__ import annotations

from array import array

from llmc.runtime.engine.scheduling.queue import ScheduledSequence, WaitingQueue

NONE: frozenset[int] = frozenset()


def waiting(number: int, rank: int | None = None, group: int | None = None) -> ScheduledSequence:
    return ScheduledSequence(number, array("q", [1]), 1, number, number if rank is None else rank, group)


def order(queue: WaitingQueue, blocked: frozenset[int] = NONE) -> list[int]:
    found = []
    while (sequence := queue.pop(blocked)) is not None:
        found.append(sequence.id)
    return found


def test_lowest_rank_first_then_first_come() -> None:
    queue = WaitingQueue()
    for sequence in (waiting(1, 5), waiting(2, 3), waiting(3, 5), waiting(4, 4)):
        queue.push(sequence)
    assert len(queue) == 4
    assert order(queue) == [2, 4, 1, 3]
    assert len(queue) == 0


def test_a_blocked_group_does_not_hold_up_others_and_keeps_its_place() -> None:
    queue = WaitingQueue()
    for sequence in (waiting(1, group=0), waiting(2), waiting(3, group=0), waiting(4)):
        queue.push(sequence)
    first = queue.pop(frozenset({0}))
    assert first is not None and first.id == 2
    assert len(queue) == 3
    queue.release(0)
    assert order(queue) == [1, 3, 4]


def test_forgotten_sequences_never_come_up() -> None:
    queue = WaitingQueue()
    all_of_them = [waiting(number, group=number % 2 or None) for number in range(100)]
    for sequence in all_of_them:
        queue.push(sequence)
    assert order(queue, frozenset({1})) == list(range(0, 100, 2))  # the others stepped aside
    for sequence in all_of_them[1:90:2]:
        sequence.gone = True
        queue.discard(sequence)
    assert len(queue) == 5
    queue.release(1)
    assert order(queue) == [91, 93, 95, 97, 99]


def test_many_forgotten_sequences_are_not_kept_in_memory() -> None:
    queue = WaitingQueue()
    for number in range(1000):
        sequence = waiting(number)
        queue.push(sequence)
        sequence.gone = True
        queue.discard(sequence)
    assert len(queue) == 0
    assert len(queue._heap) <= 17
