"""What the figures of the suite are held against: ratios of llmc to a baseline, and shares of the memory roofline."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from baselines.compare import OF_ROOFLINE
from baselines.report_text import number
from baselines.results import Comparison, Series

from llmc.buckets.render.text import table


@dataclass(frozen=True)
class Goal:
    """The ratio of a measurement (by the start of its name) that a bundle is to reach.

    `baseline`: the start of one baseline's name; None: the best one of the bundle's quality class, where that was
    measured. `bits`: of bundles alone whose weights have so many bits, 4 with some of more.
    """

    measurement: str
    ratio: float
    baseline: str | None = None
    bits: int | None = None


GOALS = (
    Goal("decode step, batch 1", 0.75, bits=8),
    Goal("decode step, batch 1", 0.60, bits=4),
    Goal("decode step, batch 4", 0.55),
    Goal("decode step, batch 8", 0.55),
    Goal("decode step, batch 16", 0.55),
    Goal("prefill of 512", 0.70),
    Goal("prefill of 2,048", 0.80),
    Goal("prefill of 8,128", 0.80),
    Goal("process start to first token", 0.5),
    Goal("memory", 0.85, "openvino-genai int8"),
    Goal("recorded lengths, 8 at a time: throughput", 1.15, "openvino-genai int8"),
    Goal("recorded lengths, 8 at a time: p95 between", 1.0, "openvino-genai int8"),
)
ROOFLINE = "decode step, batch 1"
LEAST_SHARES = {8: 0.70, 4: 0.60}
"""Bits of a weight → the least share of the memory roofline."""


def report(found: Comparison) -> list[str]:
    """A line for each goal and bundle: what is wanted, what was seen, and whether that is enough."""
    classes = {c.name: 4 if 4 <= c.bits < 8 else round(c.bits) for c in found.contenders if c.bits}
    rows = [("goal", "bundle", "wanted", "seen", "")]
    for goal in GOALS:
        for series in (s for s in found.series if _is(s, goal.measurement)):
            for ours, baseline, ratio in _ratios(found, series, goal):
                if goal.bits not in (None, classes.get(ours)):
                    continue
                sign = "≤" if series.better == "less" else "≥"
                met = ratio <= goal.ratio if series.better == "less" else ratio >= goal.ratio
                what = f"{series.name}, over {baseline}"
                rows.append((what, ours, f"{sign} {goal.ratio:.2f}", f"{ratio:.2f}", "met" if met else "MISSED"))
    for series in (s for s in found.series if _is(s, ROOFLINE)):
        for one in found.contenders:
            share = series.shares.get(one.name, {}).get(OF_ROOFLINE)
            least = LEAST_SHARES.get(classes.get(one.name, 0))
            if one.kind == "llmc" and least is not None and share is not None:
                met = share >= least
                rows.append(
                    (f"{series.name}, share of the roofline", one.name, f"≥ {least:.2f}", number(share),
                     "met" if met else "MISSED")
                )  # fmt: skip
    return table(rows, right=(2, 3))


def _is(series: Series, name: str) -> bool:
    """Whether a measurement's name is `name`, or goes on after a whole word of it."""
    return series.name == name or (series.name.startswith(name) and not series.name[len(name)].isalnum())


def _ratios(found: Comparison, series: Series, goal: Goal) -> list[tuple[str, str, float]]:
    if goal.baseline is None:
        return [(r.ours, r.baseline, r.median) for r in found.ratios(series) if r.by == "class"]
    ours = [c.name for c in found.contenders if c.kind == "llmc" and c.name in series.rounds]
    baselines = [c.name for c in found.contenders if c.kind == "baseline" and c.name.startswith(goal.baseline)]
    there = [name for name in baselines if name in series.rounds]
    if not there:
        return []
    best = (min if series.better == "less" else max)(there, key=series.median)
    return [(name, best, median(series.ratios(name, best))) for name in ours]
