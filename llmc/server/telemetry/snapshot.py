"""Dashboard data: the last minute by second, and totals since the start."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from llmc.runtime.engine.observer import Observer, RequestSummary, StepRecord
from llmc.server.telemetry.metrics import BucketKey, BucketSums, StepSums, merged

if TYPE_CHECKING:
    from llmc.buckets.plan import Plan

WINDOW_S = 60
"""Whole seconds that are kept individually."""

QUANTILES = (("p50", 0.5), ("p95", 0.95))
COUNTS = ("arrived", "finished", "prompt_tokens", "generated_tokens", "cached_tokens", "misses")

_STEPS_PER_E = 25
"""Latencies are counted in steps of e^(1/25), 4%: a quantile is within 2% of the true value."""

_SHORTEST_S = 1e-6
_OFFSET = 400


class Second:
    """Counts of one second."""

    __slots__ = (*COUNTS, "first", "inter", "running", "uses", "waiting")

    def __init__(self) -> None:
        self.arrived = self.finished = self.prompt_tokens = self.generated_tokens = self.cached_tokens = 0
        self.misses = self.running = self.waiting = 0
        self.first: dict[int, int] = {}
        self.inter: dict[int, int] = {}
        self.uses: dict[BucketKey, StepSums] = {}


class Snapshot(Observer):
    """Observes the engine; `to_dict` is thread-safe. prompt_tokens exclude cached ones; `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._uses = BucketSums()
        self._at = int(clock())
        self._past: deque[Second] = deque(maxlen=WINDOW_S)
        self._now = Second()
        self._totals = dict.fromkeys((*COUNTS, "steps"), 0)
        self._used: dict[BucketKey, StepSums] = {}
        self._running = self._waiting = 0
        self._queued: set[str] = set()

    def bind(self, plan: Plan) -> None:
        """Count steps by the buckets of `plan`."""
        with self._lock:
            self._uses.bind(plan)

    # From the engine

    def arrived(self, request_id: str, prompt_tokens: int) -> None:
        """Count the request as waiting."""
        with self._lock:
            self._second().arrived += 1
            self._queued.add(request_id)
            self._waiting += 1

    def admitted(self, request_id: str, queue_s: float, cached_tokens: int) -> None:
        """Count the request as running."""
        with self._lock:
            self._second().cached_tokens += cached_tokens
            if request_id in self._queued:
                self._queued.remove(request_id)
                self._waiting -= 1
                self._running += 1

    def stepped(self, record: StepRecord) -> None:
        """Count the step for its bucket."""
        with self._lock:
            second = self._second()
            if not record.handed:
                self._uses.add(record)
            if record.phase == "prompt":
                second.prompt_tokens += record.live_tokens
            if record.miss:
                second.misses += 1

    def emitted(self, first_token_s: Sequence[float], inter_token_s: Sequence[float]) -> None:
        """Count the tokens and their latencies."""
        with self._lock:
            second = self._second()
            second.generated_tokens += len(first_token_s) + len(inter_token_s)
            _count(second.first, first_token_s)
            _count(second.inter, inter_token_s)

    def finished(self, summary: RequestSummary) -> None:
        """Count the request as finished."""
        with self._lock:
            self._second().finished += 1
            if summary.request_id in self._queued:
                self._queued.remove(summary.request_id)
                self._waiting -= 1
            elif self._running:
                self._running -= 1

    # For the dashboard

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, ready for JSON.

        series    a list for each of running, waiting, requests (finished), prompt_tokens, generated_tokens and
                  {ttft,itl}_{p50,p95} in seconds (None: no token): one number per whole second, the newest last, at
                  most WINDOW_S of them
        window    rates per second and quantiles over all of these seconds, and their number (`seconds`)
        now       running and waiting requests
        totals    counts since the start
        buckets   `window` and `total`: rows [phase, batch, query, context, steps, live rows, live tokens, padding
                  tokens, seconds]; batch 0: steps that no bucket covers
        """
        with self._lock:
            current = self._second()
            past = list(self._past)
            running, waiting = self._running, self._waiting
            used = {key: use.copy() for key, use in self._used.items()}
            unfolded = self._uses.copy()
            totals = self._totals.copy()
            for name in COUNTS:
                totals[name] += getattr(current, name)
        merged(used, unfolded)
        totals["steps"] = sum(use.steps for use in used.values())
        recent: dict[BucketKey, StepSums] = {}
        for second in past:
            merged(recent, second.uses)
        series: dict[str, list[int] | list[float | None]] = {
            "running": [s.running for s in past],
            "waiting": [s.waiting for s in past],
            "requests": [s.finished for s in past],
            "prompt_tokens": [s.prompt_tokens for s in past],
            "generated_tokens": [s.generated_tokens for s in past],
            **{f"ttft_{name}": [quantile(s.first, part) for s in past] for name, part in QUANTILES},
            **{f"itl_{name}": [quantile(s.inter, part) for s in past] for name, part in QUANTILES},
        }
        seconds = len(past)
        first, inter = _summed(s.first for s in past), _summed(s.inter for s in past)
        rates = (("requests", "finished"), ("prompt_tokens", "prompt_tokens"), ("generated_tokens", "generated_tokens"))
        window: dict[str, float | None] = {
            "seconds": seconds,
            **{f"{name}_per_s": sum(getattr(s, of) for s in past) / max(1, seconds) for name, of in rates},
            **{f"ttft_{name}": quantile(first, part) for name, part in QUANTILES},
            **{f"itl_{name}": quantile(inter, part) for name, part in QUANTILES},
        }
        return {
            "series": series,
            "window": window,
            "now": {"running": running, "waiting": waiting},
            "totals": totals,
            "buckets": {"window": _rows(recent), "total": _rows(used)},
        }

    def _second(self) -> Second:
        """Also closes the seconds before it."""
        at = int(self._clock())
        if at != self._at:
            self._roll(at)
        return self._now

    def _roll(self, at: int) -> None:
        for _ in range(min(at - self._at, WINDOW_S + 1)):
            second, self._now = self._now, Second()
            second.uses = self._uses.take()
            second.running, second.waiting = self._running, self._waiting
            for name in COUNTS:
                self._totals[name] += getattr(second, name)
            merged(self._used, second.uses)
            self._past.append(second)
        self._at = at


def quantile(counts: dict[int, int], part: float) -> float | None:
    """Return the value in seconds that a `part` of the counts do not exceed; None without counts."""
    left = math.ceil(part * sum(counts.values()))
    for index in sorted(counts):
        left -= counts[index]
        if left <= 0:
            return float(f"{math.exp((index - _OFFSET + 0.5) / _STEPS_PER_E):.3g}")
    return None


def _count(counts: dict[int, int], values: Iterable[float]) -> None:
    log = math.log
    for value in values:
        index = int(log(value if value > _SHORTEST_S else _SHORTEST_S) * _STEPS_PER_E + _OFFSET)
        counts[index] = counts.get(index, 0) + 1


def _summed(many: Iterable[dict[int, int]]) -> dict[int, int]:
    total: Counter[int] = Counter()
    for counts in many:
        total.update(counts)
    return total


def _rows(uses: dict[BucketKey, StepSums]) -> list[list[Any]]:
    return [
        [*key, use.steps, use.rows, use.live, use.padding, round(use.seconds, 6)] for key, use in sorted(uses.items())
    ]
