"""A comparison as text: one table of the contenders, then one for each measurement, then the ratios, won or lost."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from baselines.results import By, Comparison, Ratio, Series
from llmc.buckets.render.text import table

HEADS: Mapping[By, str] = {
    "class": "llmc over the best baseline of its class",
    "bits": "llmc over the best baseline of as many bits or more (quality was not measured, so no class is known)",
}


def text(found: Comparison) -> str:
    """All measurements, and the missing ones with reasons."""
    host = found.host
    lines = [
        f"{found.model} on {host['cpu']}, {found.threads} threads, {host['memory_gib']} GiB; medians over rounds in "
        "which all engines take turns",
    ]
    if found.bandwidth:
        lines.append(f"memory read by {found.threads} threads: {found.bandwidth / 1e9:.1f} GB/s")
    lines += ["", *contenders(found)]
    for series in found.series:
        lines += ["", *measurement(found, series)]
    lines += ["", *ratios(found)]
    lines += [f"note: {note}" for note in notes(found)]
    return "\n".join(lines) + "\n"


def notes(found: Comparison) -> list[str]:
    """Notes to the figures: missing measurements, the order of turns, the baselines' settings."""
    more = [f"interrupted: {what} was not measured" for what in found.unfinished]
    if any(len(order) > 1 for series in found.series for order in series.orders):
        more.append("the order of engines turns by one each round")
    return [*more, *settings(found), *found.notes]


def settings(found: Comparison) -> list[str]:
    """The settings that each baseline was measured with where several were tried, and what they were chosen from."""
    lines = []
    for one in (trial for trial in found.tuning if trial.chosen):
        tried = [t for t in found.tuning if (t.contender, t.use) == (one.contender, one.use)]
        others = ", ".join(
            f"{words(t.options)} {'failed' if t.seconds is None else f'{t.seconds * 1e3:.0f} ms'}" for t in tried
        )
        lines.append(f"{one.contender} for {one.use}: {words(one.options)} (tried: {others})")
    return lines


def words(options: Mapping[str, Any]) -> str:
    """Options in words; "its defaults" for none."""
    return ", ".join(f"{name} {value}" for name, value in options.items()) or "its defaults"


def contenders(found: Comparison) -> list[str]:
    """Who took part, and how near to float32 each is."""
    rows = [("engine", "KL to f32", "p99", "same top token", "class", "versions")]
    for one in found.contenders:
        quality = found.quality.get(one.name)
        figures = ("–", "–", "–", "not measured")
        if quality is not None:
            figures = (
                f"{quality.mean_kl:.4f}", f"{quality.p99_kl:.3f}", f"{quality.top1:.1%}", quality.class_name,
            )  # fmt: skip
        versions = ", ".join(f"{name} {version}" for name, version in sorted(one.versions.items()))
        rows.append((one.name, *figures, versions))
    return table(rows, right=range(1, 4))


def measurement(found: Comparison, series: Series) -> list[str]:
    """Every contender's median and extremes, and each bundle's ratio to each baseline."""
    ours = [c.name for c in found.contenders if c.kind == "llmc" and c.name in series.rounds]
    rows = [(f"{series.name}, {series.unit}", "median", "least", "most", *(f"{name} over it" for name in ours), "")]
    for one in found.contenders:
        values = series.rounds.get(one.name)
        if values is None:
            continue
        over = [
            f"{median(series.ratios(name, one.name)):.2f}" if one.kind == "baseline" else "" for name in ours
        ]  # fmt: skip
        shares = ", ".join(f"{share:.0%} {what}" for what, share in series.shares.get(one.name, {}).items())
        numbers = [number(value) for value in (series.median(one.name), min(values), max(values))]
        rows.append((one.name, *numbers, *over, shares))
    missing = [why if why.startswith(name) else f"{name}: {why}" for name, why in series.missing.items()]
    return [*table(rows, right=range(1, 4 + len(ours))), *missing]


def ratios(found: Comparison) -> list[str]:
    """Each bundle against the best baseline of its quality class, or without a measured one of its bits, in turn."""
    tables: list[str] = []
    for by, head in HEADS.items():
        rows = [(head, "bundle", "baseline", "ratio", "range", "")]
        for series in found.series:
            for one in (ratio for ratio in found.ratios(series) if ratio.by == by):
                spread = f"{one.least:.2f}–{one.most:.2f}"
                rows.append((series.name, one.ours, one.baseline, f"{one.median:.2f}", spread, verdict(series, one)))
        if len(rows) > 1:
            tables += [*([""] if tables else []), *table(rows, right=(3,))]
    return tables or ["no bundle and baseline of one quality class were measured"]


def verdict(series: Series, ratio: Ratio) -> str:
    """In words: won, lost, or even where the rounds do not agree."""
    agree = series.wins(ratio.least) == series.wins(ratio.most)
    word = "won" if series.wins(ratio.median) else "LOST"
    return word if agree else f"{word.lower()}, not in every round"


def number(value: float) -> str:
    """Three significant digits, no exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
