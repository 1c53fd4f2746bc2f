"""Histograms over a period: the increase of a server's cumulative counts from scrape to scrape."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from llmc.buckets.traffic.formats.prometheus.exposition import Sample
from llmc.buckets.traffic.formats.prometheus.names import BUCKET, SUM, Role, cached_counters, families
from llmc.buckets.traffic.length_histogram import LengthHistogram, Lengths
from llmc.errors import InputError

MAX_SERIES = 100_000
"""Series that are kept; a server has some forty."""

LARGEST = float(1 << 53)
"""Above every finite bound of a bucket."""

Labels = tuple[tuple[str, str], ...]
Group = tuple[Role, str, Labels]
"""The series of one histogram of one server: role, family, and all labels but the bound."""


@dataclass
class _Counter:
    """A histogram's buckets by bound and the sum of its lengths: at the last scrape, and grown since the first."""

    last: dict[float, float] = field(default_factory=dict)
    grown: dict[float, float] = field(default_factory=dict)
    last_sum: float = 0.0
    grown_sum: float = 0.0
    has_sum: bool = False


class Increase:
    """The increase of servers' token histograms over scrapes that are added in order.

    After one scrape it is everything counted since the servers started. A histogram that is smaller than in the
    previous scrape was reset by a restart: all of its counts are since then.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._counters: dict[Group, _Counter] = {}
        self._scrapes = 0
        self._times: list[float] = []
        self.resets = 0

    def add(self, scrape: Iterable[Sample]) -> None:
        """Add one scrape. Raises InputError for a histogram without +Inf or whose counts fall from bound to bound."""
        buckets: dict[Group, dict[float, float]] = {}
        sums: dict[Group, float] = {}
        for size, sample in enumerate(scrape):
            if size == MAX_SERIES:
                raise InputError(
                    f"{self._where}: has more than {MAX_SERIES} series; narrow it to the servers of one model"
                )
            labels = {name: value for name, value in sample.labels.items() if name not in ("le", "__name__")}
            group = (sample.series.role, sample.series.family, tuple(sorted(labels.items())))
            if sample.series.part == BUCKET:
                bound = _bound(sample.labels.get("le", ""), self._where)
                known = buckets.setdefault(group, {})
                known[bound] = max(sample.value, known.get(bound, 0.0))
            elif sample.series.role == "cached":
                buckets[group] = {math.inf: sample.value}
            elif sample.series.part == SUM:
                sums[group] = sample.value
            if sample.time is not None and (not self._times or sample.time != self._times[-1]):
                self._times = [*self._times[:1], sample.time]
        first = self._scrapes == 0
        self._scrapes += 1
        for group, counts in buckets.items():
            LengthHistogram.of(counts, None, f"{self._where}: {group[1]}")
            self._grow(group, counts, sums.get(group), first)

    def _grow(self, group: Group, counts: dict[float, float], total: float | None, first: bool) -> None:
        counter = self._counters.setdefault(group, _Counter())
        if any(counts.get(bound, 0.0) < before for bound, before in counter.last.items()):
            self.resets += 1
            counter.last, counter.last_sum = {}, 0.0
        if not first:
            for bound, count in counts.items():
                counter.grown[bound] = counter.grown.get(bound, 0.0) + count - counter.last.get(bound, 0.0)
            if total is not None:
                counter.grown_sum += total - counter.last_sum
        counter.last, counter.last_sum, counter.has_sum = counts, total or 0.0, total is not None

    @property
    def requests(self) -> int:
        """Requests seen so far."""
        return round(sum(max(of.values(), default=0.0) for of in self._found("prompt")))

    def lengths(self, duration: float | None = None) -> Lengths:
        """Return the histograms of all servers together; `duration` defaults to the time between the first and last
        scrape.

        Raises InputError where one of the two is missing, is empty, or has other bounds on another server.
        """
        prompt, output = self._joined("prompt"), self._joined("output")
        if duration is None and len(self._times) > 1 and self._times[-1] > self._times[0]:
            duration = self._times[-1] - self._times[0]
        return Lengths(prompt, output, duration, tuple(self._notes(prompt)))

    def _found(self, role: Role) -> list[dict[float, float]]:
        return [
            counter.grown if self._scrapes > 1 else counter.last
            for group, counter in self._counters.items()
            if group[0] == role
        ]

    def _joined(self, role: Role) -> LengthHistogram:
        found = self._found(role)
        what = f"{self._where}: no histogram of the {role} tokens"
        if not found:
            raise InputError(f"{what}; known are {', '.join(families())} with _bucket, _sum and _count")
        joined: dict[float, float] = {}
        for counts in found:
            if joined and counts and counts.keys() != joined.keys():
                raise InputError(
                    f"{self._where}: servers count the {role} tokens in different buckets; give one of them at a time"
                )
            for bound, count in counts.items():
                joined[bound] = joined.get(bound, 0.0) + count
        if not joined or not max(joined.values()):
            since = "between the first scrape and the last" if self._scrapes > 1 else "since the server started"
            raise InputError(f"{what} has a request {since}; wait for traffic, or sample for longer")
        counters = [counter for group, counter in self._counters.items() if group[0] == role]
        total = sum(one.grown_sum if self._scrapes > 1 else one.last_sum for one in counters)
        return LengthHistogram.of(joined, total if all(one.has_sum for one in counters) else None, self._where)

    def _cached(self) -> int:
        """Prompt tokens from a prefix cache, by the best counter of those in the scrapes."""
        for name in cached_counters():
            if groups := [group for group in self._counters if group[:2] == ("cached", name)]:
                counters = [self._counters[group] for group in groups]
                return round(sum((one.grown if self._scrapes > 1 else one.last).get(math.inf, 0.0) for one in counters))
        return 0

    def _notes(self, prompt: LengthHistogram) -> list[str]:
        found = []
        if cached := self._cached():
            of = "" if prompt.total is None else f" of {prompt.total:,}"
            found.append(
                f"{cached:,}{of} prompt tokens came from the prefix cache; which requests had them is not known"
            )
        if self.resets:
            found.append(f"counters were reset {self.resets} times, as by a restart; what came after it counts from 0")
        if self._scrapes == 1:
            found.append("one scrape: everything since the server started, its own warm-up requests included")
        models = {value for group in self._counters for name, value in group[2] if name == "model_name"}
        if len(models) > 1:
            found.append(f"{len(models)} models are added up: {', '.join(sorted(models)[:8])}")
        return found


def _bound(text: str, where: str) -> float:
    try:
        bound = float(text)
    except ValueError:
        bound = math.nan
    if not 0 <= bound < LARGEST and bound != math.inf:
        raise InputError(f'{where}: a bucket whose bound le="{text:.40}" is not a length; give the buckets as scraped')
    return bound


def apart(samples: Iterable[Sample]) -> Iterator[list[Sample]]:
    """Split the samples of consecutive scrapes, scrape by scrape: one ends where a series repeats."""
    scrape: list[Sample] = []
    seen: set[tuple[object, ...]] = set()
    for sample in samples:
        key = (sample.series, *sorted(sample.labels.items()))
        if key in seen or len(scrape) > MAX_SERIES:
            yield scrape
            scrape, seen = [], set()
        scrape.append(sample)
        seen.add(key)
    if scrape:
        yield scrape
