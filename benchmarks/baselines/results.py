"""The results of a comparison: the figures of every round, and which contenders are compared.

A ratio is llmc's figure over a baseline's in the same round, and the median of these over the rounds; for times and
memory below 1, for rates above 1, llmc is the better. The baseline of a ratio is the best one, by its median, of those
whose quality is in the class of the bundle's or a nearer one to float32. Where no quality was measured, it is of those
that have as many bits a weight or more, and the ratio says so: no class is known then.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

from baselines.quality import Quality
from baselines.worker import Contender
from llmc.errors import InputError
from llmc.files import read_text, write_text

By = Literal["class", "bits"]
"""The reason for comparing a bundle with a baseline: measured quality, or nominal bits alone."""

VERSION = 1
"""Of the JSON document."""
KIND = "llmc-comparison"


@dataclass
class Series:
    """One measurement: a figure of each contender in each round, in the order of the rounds.

    `orders` has the order in which contenders were asked in each round. `missing` says why one has none. `shares` are
    further figures of a contender, between 0 and 1: "outside the graphs", the part of llmc's time that its executables
    did not run; "of the roofline", see Comparison.
    """

    name: str
    unit: str
    better: Literal["less", "more"] = "less"
    rounds: dict[str, list[float]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    shares: dict[str, dict[str, float]] = field(default_factory=dict)
    orders: list[list[str]] = field(default_factory=list)

    def add(self, name: str, value: float) -> None:
        """One more round."""
        self.rounds.setdefault(name, []).append(value)

    def drop(self, name: str, why: str) -> None:
        """A contender that cannot run this."""
        self.rounds.pop(name, None)
        self.missing[name] = why

    def share(self, name: str, what: str, values: list[float]) -> None:
        """The median of a share's values."""
        if values:
            self.shares.setdefault(name, {})[what] = median(values)

    def median(self, name: str) -> float:
        """Over the rounds."""
        return median(self.rounds[name])

    def ratios(self, ours: str, baseline: str) -> list[float]:
        """Of each round that both have."""
        return [a / b for a, b in zip(self.rounds[ours], self.rounds[baseline], strict=False)]

    def wins(self, ratio: float) -> bool:
        """Whether a ratio says that llmc is at least as good."""
        return ratio <= 1 if self.better == "less" else ratio >= 1


@dataclass(frozen=True)
class Ratio:
    """A bundle's figure over the best baseline's, the median over rounds and its extremes; `by`: why this baseline
    counts."""

    ours: str
    baseline: str
    median: float
    least: float
    most: float
    by: By = "class"


@dataclass(frozen=True)
class Trial:
    """A setting of a baseline that was tried for measurements of one `use` (tuning.py): `seconds`, or why it failed.

    `chosen`: the measurements were made with it.
    """

    contender: str
    use: str
    options: Mapping[str, Any]
    seconds: float | None = None
    error: str = ""
    chosen: bool = False


@dataclass
class Comparison:
    """All of one model's measurements on one host.

    `weights`: values in the matrices that a decode step reads, a tied head once. The roofline of a step is the time to
    read them once, at the contender's nominal bits (scales do not count), at `bandwidth` bytes a second.

    `tuning`: each setting of a baseline that was tried, see tuning.py. `unfinished`: what an interrupt left unmeasured,
    in words; empty where everything that was asked for was tried.
    """

    model: str
    host: Mapping[str, Any]
    threads: int
    contenders: list[Contender]
    bandwidth: float | None = None
    weights: int | None = None
    quality: dict[str, Quality] = field(default_factory=dict)
    series: list[Series] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tuning: list[Trial] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)

    def roofline_s(self, contender: Contender) -> float | None:
        """Seconds of a decode step that only reads the weights."""
        if not (self.bandwidth and self.weights and contender.bits):
            return None
        return self.weights * contender.bits / 8 / self.bandwidth

    def baselines_of(self, ours: Contender) -> list[str]:
        """Names of the baselines that a bundle is to be compared with."""
        found = []
        for baseline in (c for c in self.contenders if c.kind == "baseline"):
            if self.by(ours.name, baseline.name) == "class":
                fair = self.quality[baseline.name].rank <= self.quality[ours.name].rank
            else:
                fair = ours.bits is None or baseline.bits is None or baseline.bits >= ours.bits
            if fair:
                found.append(baseline.name)
        return found

    def by(self, ours: str, baseline: str) -> By:
        """What says whether a baseline is of a bundle's class: the quality of both, or where one has none their
        bits."""
        return "class" if {ours, baseline} <= set(self.quality) else "bits"

    def ratios(self, series: Series) -> list[Ratio]:
        """Each bundle against the best of its baselines, in the order of the bundles."""
        found = []
        for ours in (c for c in self.contenders if c.kind == "llmc" and c.name in series.rounds):
            baselines = [name for name in self.baselines_of(ours) if name in series.rounds]
            if baselines:
                best = (min if series.better == "less" else max)(baselines, key=series.median)
                values = series.ratios(ours.name, best)
                if values:
                    middle, by = median(values), self.by(ours.name, best)
                    found.append(Ratio(ours.name, best, middle, min(values), max(values), by))
        return found

    def to_dict(self) -> dict[str, Any]:
        """For JSON; the ratios are in it, for readers that do not want to compute them."""
        found = asdict(self)
        for one, series in zip(found["series"], self.series, strict=True):
            one["medians"] = {name: series.median(name) for name in series.rounds}
            one["ratios"] = [asdict(ratio) for ratio in self.ratios(series)]
        for contender in found["contenders"]:  # paths and programs of one host mean nothing on another
            del contender["python"], contender["model"], contender["options"]
        return {"version": VERSION, "kind": KIND, **found}

    def save(self, path: Path) -> None:
        """Write the JSON document; raises InputError when it cannot be written."""
        write_text(path, json.dumps(self.to_dict(), indent=1) + "\n", "results")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = "results") -> Comparison:
        """From `to_dict`; raises InputError for what is none, or of another version."""
        if data.get("kind") != KIND or data.get("version") != VERSION:
            raise InputError(
                f"{source}: not a comparison of version {VERSION}; measure again with benchmarks/compare.py"
            )
        names = ("name", "unit", "better", "rounds", "missing", "shares", "orders")
        try:
            return cls(
                data["model"], data["host"], data["threads"],
                [Contender(python="", model="", **one) for one in data["contenders"]],
                data["bandwidth"], data["weights"],
                {name: Quality(**one) for name, one in data["quality"].items()},
                [Series(**{name: one[name] for name in names if name in one}) for one in data["series"]],
                list(data["notes"]), [Trial(**one) for one in data.get("tuning", [])],
                list(data.get("unfinished", [])),
            )  # fmt: skip
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{source}: a damaged comparison ({error!r}); measure again") from error

    @classmethod
    def load(cls, path: Path) -> Comparison:
        """From a file that `save` wrote; raises InputError."""
        try:
            data = json.loads(read_text(path, "results"))
        except ValueError as error:
            raise InputError(f"{path}: not JSON ({error})") from error
        if not isinstance(data, dict):
            raise InputError(f"{path}: not a comparison")
        return cls.from_dict(data, str(path))
