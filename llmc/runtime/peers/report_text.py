"""A comparison as text: one table of the contenders, then one for each measurement, then the ratios, won or lost."""

from __future__ import annotations

from statistics import median

from llmc.buckets.text_table import table
from llmc.runtime.peers.results import Comparison, Ratio, Series


def text(found: Comparison) -> str:
    """Everything that was measured, and what was not and why."""
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
    lines += [f"note: {note}" for note in found.notes]
    return "\n".join(lines) + "\n"


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
    """Every contender's median and extremes, and each bundle's ratio to each peer."""
    ours = [c.name for c in found.contenders if c.kind == "llmc" and c.name in series.rounds]
    rows = [(f"{series.name}, {series.unit}", "median", "least", "most", *(f"{name} over it" for name in ours), "")]
    for one in found.contenders:
        values = series.rounds.get(one.name)
        if values is None:
            continue
        over = [
            f"{median(series.ratios(name, one.name)):.2f}" if one.kind == "peer" else "" for name in ours
        ]  # fmt: skip
        shares = ", ".join(f"{share:.0%} {what}" for what, share in series.shares.get(one.name, {}).items())
        numbers = [number(value) for value in (series.median(one.name), min(values), max(values))]
        rows.append((one.name, *numbers, *over, shares))
    missing = [why if why.startswith(name) else f"{name}: {why}" for name, why in series.missing.items()]
    return [*table(rows, right=range(1, 4 + len(ours))), *missing]


def ratios(found: Comparison) -> list[str]:
    """Each bundle against the best peer of its quality class, measurement by measurement."""
    rows = [("llmc over the best peer of its class", "bundle", "peer", "ratio", "range", "")]
    for series in found.series:
        for ratio in found.ratios(series):
            spread = f"{ratio.least:.2f}–{ratio.most:.2f}"
            rows.append((series.name, ratio.ours, ratio.peer, f"{ratio.median:.2f}", spread, verdict(series, ratio)))
    return table(rows, right=(3,)) if len(rows) > 1 else ["no bundle and peer of one quality class were measured"]


def verdict(series: Series, ratio: Ratio) -> str:
    """In words: won, lost, or even where the rounds do not agree."""
    agree = series.wins(ratio.least) == series.wins(ratio.most)
    word = "won" if series.wins(ratio.median) else "LOST"
    return word if agree else f"{word.lower()}, not in every round"


def number(value: float) -> str:
    """Three significant digits, no exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
