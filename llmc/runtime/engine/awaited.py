"""Sequences whose prompts the prefill side computes: what they wait for, and what came."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from llmc.runtime.engine.handover import HandOver, Prefilled, PrefillFailed

if TYPE_CHECKING:
    from array import array

    from numpy.typing import NDArray

    from llmc.runtime.engine.handover import Prefiller
    from llmc.runtime.engine.scheduling.base import ScheduledBatch
    from llmc.runtime.executors.base import Executor

TRIES = 2
"""How often the prefill side is asked for a prompt."""


@dataclass(slots=True)
class Awaited:
    """A prompt that is computed once for `sequences`, each with its budget of tokens; `tries` so far."""

    number: int
    prompt: Sequence[int] | array[int]
    priority: int
    sequences: dict[int, int] = field(default_factory=dict)
    tries: int = 1


class AwaitedPrompts:
    """Prompts at `prefiller`, and those that came and are not in a slot yet. A group's prompt has its number."""

    def __init__(self, prefiller: Prefiller) -> None:
        self.prefiller = prefiller
        self._asked: dict[int, Awaited] = {}
        self._numbers: dict[int, int] = {}
        """Of each sequence that waits."""
        self._came: dict[int, Prefilled] = {}
        """By sequence; those of a group share one."""

    def __len__(self) -> int:
        return len(self._numbers)

    def ask(
        self, sequence: int, prompt: Sequence[int], *, priority: int, group: int | None, budget: int
    ) -> None:  # fmt: skip
        """Have the prompt of a sequence computed, unless that of its group is already."""
        number = sequence if group is None else group
        awaited = self._asked.get(number)
        if awaited is None:
            awaited = self._asked[number] = Awaited(number, prompt, priority)
            self.prefiller.submit(number, prompt, priority)
        awaited.sequences[sequence] = budget
        self._numbers[sequence] = number

    def forget(self, sequence: int) -> None:
        """A sequence ended, wherever it is."""
        self._came.pop(sequence, None)
        number = self._numbers.pop(sequence, None)
        if number is None:
            return
        awaited = self._asked[number]
        del awaited.sequences[sequence]
        if not awaited.sequences:
            del self._asked[number]
            self.prefiller.cancel(number)

    def clear(self) -> None:
        """Every sequence ended."""
        for number in self._asked:
            self.prefiller.cancel(number)
        self._asked.clear()
        self._numbers.clear()
        self._came.clear()

    def news(self) -> Iterator[tuple[Awaited, PrefillFailed | None]]:
        """Prompts that came, as far as places are free for them, and those that will not come, with the reason."""
        waiting = len({one.number for one in self._came.values()})
        for one in self.prefiller.take(max(0, self.prefiller.bound - waiting)):
            awaited = self._asked.get(one.number)
            if awaited is None:
                continue
            if isinstance(one, PrefillFailed) and one.passing and awaited.tries < TRIES:
                awaited.tries += 1
                self.prefiller.submit(awaited.number, awaited.prompt, awaited.priority)
                continue
            del self._asked[one.number]
            for sequence in awaited.sequences:
                del self._numbers[sequence]
                if isinstance(one, Prefilled):
                    self._came[sequence] = one
            yield awaited, one if isinstance(one, PrefillFailed) else None

    def put(self, executor: Executor, work: ScheduledBatch) -> tuple[NDArray[np.float32], dict[int, HandOver]]:
        """Put the rows of a step that hands over into their slots; the logits of each, [B, V], and costs by sequence.

        Of a group one is put, and copied to the others.
        """
        placed: dict[int, int] = {}
        logits: list[NDArray[np.float32]] = []
        costs: dict[int, HandOver] = {}
        for row in work.rows:
            one = self._came.pop(row.sequence)
            logits.append(one.logits)
            began = time.perf_counter()
            if one.number in placed:
                executor.copy_prefix(placed[one.number], row.slot, len(row.tokens))
            else:
                executor.import_prefix(row.slot, one.prefix)
                placed[one.number] = row.slot
            ended = time.perf_counter()
            costs[row.sequence] = replace(
                one.cost, wait_s=one.cost.wait_s + began - one.arrived_s, import_s=ended - began
            )
        return np.stack(logits), costs
