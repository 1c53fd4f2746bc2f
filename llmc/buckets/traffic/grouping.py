"""How prompts that are admitted together share steps.

Planning needs to know which (batch, query, context) steps traffic asks for. Where a rule has proposed buckets, that is
what `lookup.prefill_path` makes of them; where any bucket of a grid may be chosen, it is the same rule (neighbours in
length share a step where that costs less than steps of their own) with the best-fitting point of the grid.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from llmc.buckets.candidates import Candidates
from llmc.buckets.cost import STEP_WEIGHT, TOKEN_WEIGHT
from llmc.buckets.lookup import prefill_path
from llmc.buckets.plan import Plan
from llmc.buckets.traffic.events import PromptGroup

Step = tuple[int, int, int]
"""(batch, query, context)."""


class Grouping(Protocol):
    """Cuts a group of prompts into steps of at most `widest` prompts."""

    widest: int

    def steps(self, group: PromptGroup) -> list[Step]:
        """The steps, unpadded."""
        ...


class PlanGrouping:
    """The steps that a finished plan's buckets would run."""

    def __init__(self, plan: Plan) -> None:
        self.widest = plan.prompt[-1].batch
        self._plan = plan

    def steps(self, group: PromptGroup) -> list[Step]:
        """As `Grouping.steps`."""
        return [
            (len(step.rows), max(b - a for a, b in step.spans), max(a for a, _ in step.spans))
            for step in prefill_path(self._plan, group.lengths, group.cached)
        ]


class FreeGrouping:
    """The steps of least cost when every point of the candidates' grid is a bucket.

    A step costs batch · query · (TOKEN_WEIGHT + query + context) + STEP_WEIGHT, sizes rounded up to the grid's.
    Prompts longer than the largest query run in chunks of it. No chunk starts beyond the largest context, from which
    the largest query finishes any prompt; a longer cached prefix is computed again from there.
    """

    def __init__(self, candidates: Candidates) -> None:
        self.widest = int(candidates.values[0][-1])
        self._most_tokens = candidates.limits.max_num_batched_tokens
        self._candidates = candidates
        self._largest = int(candidates.values[1][-1])
        limits = candidates.limits
        self._last = int(candidates.values[2][-1]) if limits.contexts else limits.longest_prompt
        self._batches = candidates.round_up(0, np.arange(1, self.widest + 1))

    def steps(self, group: PromptGroup) -> list[Step]:
        """As `Grouping.steps`."""
        found: list[Step] = []
        for turn in self._turns(group):
            if len(turn) == 1 or self.widest == 1:
                found += [(1, new, past) for new, past in turn]
            else:
                found += self._shared(turn)
        return found

    def _turns(self, group: PromptGroup) -> Iterator[list[tuple[int, int]]]:
        """(new tokens, tokens before) of every prompt's next chunk, turn by turn."""
        rows = list(zip(group.lengths, (min(past, self._last) for past in group.cached), strict=True))
        while rows:
            turn, rest = [], []
            for length, start in rows:
                stop = length
                if start + self._largest < length:
                    stop = min(start + self._largest, self._last)
                    rest.append((length, stop))
                turn.append((stop - start, start))
            yield turn
            rows = rest

    def _shared(self, turn: Sequence[tuple[int, int]]) -> list[Step]:
        ordered = sorted(turn)
        count = len(ordered)
        exact = np.array(ordered, np.int64)
        new = self._candidates.round_up(1, exact[:, 0])
        past = self._candidates.round_up(2, exact[:, 1] if self._candidates.limits.contexts else 0 * exact[:, 1])
        best = np.zeros(count + 1)
        begins = np.zeros(count + 1, np.int64)
        for end in range(1, count + 1):
            first = max(0, end - self.widest)
            context = np.maximum.accumulate(past[first:end][::-1])[::-1]
            tokens = self._batches[: end - first][::-1] * new[end - 1]
            total = best[first:end] + tokens * (TOKEN_WEIGHT + new[end - 1] + context) + STEP_WEIGHT
            total[:-1][tokens[:-1] > self._most_tokens] = np.inf
            begins[end] = first + int(np.argmin(total))
            best[end] = total[begins[end] - first]
        steps: list[Step] = []
        end = count
        while end:
            begin = int(begins[end])
            steps.append((end - begin, int(exact[end - 1, 0]), int(exact[begin:end, 1].max())))
            end = begin
        return steps
