"""Bucket usage counts of one phase, in bounded memory; `evaluation` turns the counts into results."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from llmc.buckets.bucket import Phase
from llmc.buckets.lookup import BucketSet, prefill_path
from llmc.buckets.traffic.events import DecodeRun, PromptGroup
from llmc.errors import InputError

Ints = NDArray[np.int64]

BINS_PER_UNIT = 1000
"""Bins for a padding of 1 (100%): each is 0.1 percentage points wide, the precision of a percentile."""

LINEAR_BINS = 10 * BINS_PER_UNIT
"""Bins of equal width, up to a padding of 10 (1000%); beyond, each bin is 0.1% wider than the one before."""

TAIL_BINS = 20 * BINS_PER_UNIT
"""Bins beyond a padding of 10; the last one covers 10·e^20 and above."""


class PaddingHistogram:
    """Steps counted by their padding (padded − real) / real."""

    def __init__(self) -> None:
        self._counts = np.zeros(LINEAR_BINS + TAIL_BINS + 1, np.int64)

    def add(self, real: Ints, padded: Ints, times: int = 1) -> None:
        """Count `times` steps for each pair [n] of `real` ≥ 1 tokens padded to `padded` ≥ real ones."""
        padding = padded / real - 1.0
        bins = np.rint(np.minimum(padding, 10.0) * BINS_PER_UNIT)
        tail = padding > 10.0
        if tail.any():
            bins[tail] += np.rint(np.log(padding[tail] / 10.0) * BINS_PER_UNIT)
            np.minimum(bins, LINEAR_BINS + TAIL_BINS, out=bins)
        self._counts += times * np.bincount(bins.astype(np.int64), minlength=len(self._counts))

    def percentile(self, percent: int) -> float | None:
        """Return the least padding that at least `percent` (1 to 100) of all steps do not exceed; None without steps.

        Within 0.05 percentage points up to 1000%, within 0.05% of itself beyond.
        """
        steps = int(self._counts.sum())
        if not steps:
            return None
        rank = -(-steps * percent // 100)
        index = int(np.searchsorted(np.cumsum(self._counts), rank))
        if index <= LINEAR_BINS:
            return index / BINS_PER_UNIT
        return float(10.0 * np.exp((index - LINEAR_BINS) / BINS_PER_UNIT))


EVENTS_AT_ONCE = 1 << 13
"""Decode runs, or prefill steps, that are counted together."""

STEPS_AT_ONCE = 1 << 20
"""Decode steps that the histogram takes at a time, unless a single bucket serves more of one run."""

PATHS_KEPT = 1 << 13
"""Groups of prompts whose path is cached: the same lengths often repeat, especially single prompts."""

Path = tuple[tuple[tuple[int, int, int, int], ...], int]
"""The steps of a group as (bucket index, rows, real tokens, tokens of the rows at the longest one's length), and the
number of its prompts that no path serves."""


class BucketUsage:
    """Counts for each bucket of one phase, in plan order: steps, rows (their live sequences) and real tokens.

    `exact` is the token count if each step ran in a bucket of exactly its size. It exceeds the real tokens where
    sequences of unequal length share a step.
    """

    def __init__(self, plan: BucketSet, phase: Phase) -> None:
        self.plan = plan
        self.buckets = plan.of(phase)
        self.indices = {bucket: index for index, bucket in enumerate(self.buckets)}
        sizes = [plan.limits.padded(bucket) for bucket in self.buckets]
        self.padded = np.array(sizes, np.int64)
        self.steps, self.rows, self.real = np.zeros((3, len(sizes)), np.int64)
        self.histogram = PaddingHistogram()
        self.uncovered = 0
        self.exact = 0

    def count(self, indices: Ints, steps: Ints | int, rows: Ints, real: Ints) -> None:
        """Add to the buckets at `indices` [n], which may repeat."""
        np.add.at(self.steps, indices, steps)
        np.add.at(self.rows, indices, rows)
        np.add.at(self.real, indices, real)


class PromptUsage(BucketUsage):
    """Counts of prompt buckets; `requests` includes the `uncovered` ones."""

    def __init__(self, plan: BucketSet) -> None:
        super().__init__(plan, "prompt")
        self.requests = 0
        self._path = lru_cache(PATHS_KEPT)(self._walk)
        self._waiting: list[tuple[int, int, int, int]] = []

    def add(self, group: PromptGroup) -> None:
        """Count the steps of `prefill_path`."""
        steps, uncovered = self._path(group)
        self.requests += len(group.lengths)
        self.uncovered += uncovered
        self._waiting += steps
        if len(self._waiting) >= EVENTS_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Count the groups that `add` deferred."""
        if not self._waiting:
            return
        indices, rows, real, exact = np.array(self._waiting, np.int64).T
        self._waiting.clear()
        self.exact += int(exact.sum())
        self.count(indices, 1, rows, real)
        self.histogram.add(real, self.padded[indices])

    def _walk(self, group: PromptGroup) -> Path:
        try:
            path = prefill_path(self.plan, group.lengths, group.cached)
        except InputError:
            return self._without_uncovered(group)
        steps = []
        for step in path:
            spans = zip(step.rows, step.spans, strict=True)
            new = [max(0, stop - max(start, group.cached[row])) for row, (start, stop) in spans]
            steps.append((self.indices[step.bucket], len(new), sum(new), len(new) * max(new)))
        return tuple(steps), 0

    def _without_uncovered(self, group: PromptGroup) -> Path:
        """The path of the prompts that are covered individually; empty where all are, since the group itself is then
        inadmissible.
        """
        pairs = list(zip(group.lengths, group.cached, strict=True))
        served = [pair for pair in pairs if len(pairs) > 1 and not self._path(PromptGroup(*zip(pair, strict=True)))[1]]
        if not served or len(served) == len(pairs):
            return (), len(pairs)
        lengths, cached = zip(*served, strict=True)
        steps, uncovered = self._path(PromptGroup(lengths, cached))
        return steps, uncovered + len(pairs) - len(served)


class DecodeUsage(BucketUsage):
    """Counts of decode buckets; `uncovered` is in steps.

    A step's least-cost bucket stays the least-cost one until the longest sequence exceeds its context: it still covers,
    and no cheaper bucket starts to. A run is therefore split at the contexts of few buckets, and counted in closed
    form.
    """

    def __init__(self, plan: BucketSet) -> None:
        super().__init__(plan, "decode")
        self._stairs: dict[int, tuple[Ints, Ints]] = {}
        self._waiting: list[DecodeRun] = []

    def add(self, run: DecodeRun) -> None:
        """Count the steps of a run."""
        self._waiting.append(run)
        if len(self._waiting) >= EVENTS_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Count the runs that `add` deferred."""
        if not self._waiting:
            return
        runs = np.array(self._waiting, np.int64)
        self._waiting.clear()
        for batch in np.unique(runs[:, 0]):
            self._count_runs(int(batch), runs[runs[:, 0] == batch, 1:])

    def _count_runs(self, batch: int, runs: Ints) -> None:
        """Count `runs` [n, 3] of (longest, total, steps), all of one batch."""
        longest, total, steps = runs.T
        if not self.plan.limits.contexts:
            self._count_computed(batch, steps)
            return
        lasts, indices = self._staircase(batch)
        covered = np.clip((lasts[-1] + 1 if len(lasts) else 0) - longest, 0, steps)
        self.uncovered += int((steps - covered).sum())
        longest, total, after = longest[covered > 0], total[covered > 0], (longest + covered)[covered > 0]
        if not len(longest):
            return
        # each run becomes one piece for every bucket that serves a part of it
        first = np.searchsorted(lasts, longest)
        pieces = np.searchsorted(lasts, after - 1) - first + 1
        run = np.repeat(np.arange(len(longest)), pieces)
        stair = np.arange(len(run)) - np.repeat(np.cumsum(pieces) - pieces, pieces) + first[run]
        start = np.maximum(longest[run], np.concatenate(([0], lasts[:-1] + 1))[stair])
        count = np.minimum(after[run], lasts[stair] + 1) - start
        begin = total[run] + batch * (start - longest[run])
        self.exact += batch * int((count * start + count * (count - 1) // 2).sum())
        self.count(indices[stair], count, batch * count, count * begin + batch * (count * (count - 1) // 2))
        self._count_padding(batch, begin, count, self.padded[indices[stair]])

    def _count_computed(self, batch: int, steps: Ints) -> None:
        """Count steps of `batch` sequences that read no cached tokens: one bucket takes them all, one token per row."""
        bucket, total = self.plan.lookup("decode", batch, 1, 0), int(steps.sum())
        if bucket is None:
            self.uncovered += total
            return
        self.exact += batch * total
        index = np.array([self.indices[bucket]])
        self.count(index, total, np.array([batch * total]), np.array([batch * total]))
        self.histogram.add(np.array([batch]), self.padded[index], total)

    def _count_padding(self, batch: int, begin: Ints, count: Ints, padded: Ints) -> None:
        """Add the `count` steps of every piece to the histogram; the first step has `begin` real tokens."""
        ends = np.cumsum(count)
        low, done = 0, 0
        while low < len(count):
            high = max(low + 1, int(np.searchsorted(ends, done + STEPS_AT_ONCE, "right")))
            repeats = count[low:high]
            # real tokens of a piece's first step, minus the tokens that the step number adds before it
            base = begin[low:high] - batch * (ends[low:high] - repeats)
            real = np.repeat(base, repeats) + batch * np.arange(done, ends[high - 1])
            self.histogram.add(real, np.repeat(padded[low:high], repeats))
            low, done = high, int(ends[high - 1])

    def _staircase(self, batch: int) -> tuple[Ints, Ints]:
        """For `batch` sequences, ascending: the last context of each stair, and the index of its bucket."""
        if batch not in self._stairs:
            stairs: list[tuple[int, int]] = []
            bucket = self.plan.lookup("decode", batch, 1, 0)
            while bucket is not None:
                stairs.append((bucket.context, self.indices[bucket]))
                bucket = self.plan.lookup("decode", batch, 1, bucket.context + 1)
            lasts, indices = np.array(stairs, np.int64).reshape(-1, 2).T
            self._stairs[batch] = lasts, indices
        return self._stairs[batch]
