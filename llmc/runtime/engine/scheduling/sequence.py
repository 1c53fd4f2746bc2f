"""A sequence as the scheduler keeps it, from its arrival to its end."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

Span = tuple[int, int]
"""Half-open range of a sequence's tokens, (start, stop)."""


@dataclass(slots=True, eq=False)
class ScheduledSequence:
    """`tokens` are the prompt and the answer so far; slot `slot` holds the first `cached` of them (−1: no slot yet).

    `rank` and `arrival` order the queue, lowest first. `gone` is set when it finished or was cancelled. `spans` are
    the prompt's spans that are left to compute along `cap`, last first; empty: to be worked out anew. `reserved`:
    tokens of a shared pool that are kept for it. `handed`: another executor computed its prompt. `floor`: the first
    place but 0 where a step may start in its slot, once the step that runs is done. `adapter`: which of the bundle's
    adapters it is computed with, 0 for none.
    """

    id: int
    tokens: array[int]
    prompt_length: int
    arrival: int
    rank: int
    group: int | None = None
    slot: int = -1
    cached: int = 0
    gone: bool = False
    cap: int = -1
    spans: list[Span] = field(default_factory=list)
    reserved: int = 0
    handed: bool = False
    floor: int = 0
    adapter: int = 0
