"""The figures of a bake-off as numbers and lines: medians, shares of the roofline, and speeds over transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from baselines.results import Series

from llmc.buckets.render.text import table

ROOFLINE = "memory copy"
BASELINES = ("transformers eager", "transformers reduce-overhead")
"""What a backend has to be as fast as, at every point."""
GOAL_SHARE, GOAL_SPEED = 0.80, 1.0
GRAPH_ERROR = 0.15


def share(series: Series, name: str) -> float | None:
    """Of the roofline: the copy's time over the contender's in the same round, the median over rounds."""
    if ROOFLINE not in series.rounds or name not in series.rounds:
        return None
    return median(series.ratios(ROOFLINE, name))


def speed(series: Series, name: str) -> tuple[str, float] | None:
    """The best of BASELINES by its median, and its time over the contender's in the same round, the median over
    rounds."""
    there = [baseline for baseline in BASELINES if baseline in series.rounds and baseline != name]
    if not there or name not in series.rounds:
        return None
    best = min(there, key=series.median)
    return best, median(series.ratios(best, name))


def of_series(series: Series) -> dict[str, Any]:
    """For JSON: every round's figures, and what is made of them."""
    built = {}
    for name in series.rounds:
        built[name] = {"median": series.median(name), "rounds": series.rounds[name], "of_roofline": share(series, name)}
        if (found := speed(series, name)) is not None:
            built[name] |= {"over": found[0], "speed": found[1]}
    return {"unit": series.unit, "orders": series.orders, "missing": series.missing, "contenders": built}


def of_graphs(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Seconds and bytes of a graph, medians, and how near the predictions were, where both are known."""
    sized = [row for row in rows if row["bytes"] is not None]
    ratios = [row["predicted"] / row["bytes"] for row in sized if row["predicted"] is not None and row["bytes"] > 0]
    return {
        "graphs": len(rows), "seconds": median(r["seconds"] for r in rows) if rows else None,
        "seconds_of_all": sum(r["seconds"] for r in rows),
        "bytes": median(r["bytes"] for r in sized) if sized else None,
        "bytes_of_all": sum(r["bytes"] for r in sized) if sized else None,
        "predicted_over_measured": median(ratios) if ratios else None,
        "within_15%": sum(abs(r - 1) <= GRAPH_ERROR for r in ratios) / len(ratios) if ratios else None,
    }  # fmt: skip


def text(found: Mapping[str, Any]) -> str:
    """All of a bake-off, with a line for whatever could not run."""
    lines = [f"{found['machine'].get('gpu', found['machine']['cpu'])}; medians over rounds in which all take turns"]
    for shape, parts in found["shapes"].items():
        lines += ["", f"## {shape}"]
        for name, series in parts["series"].items():
            lines += ["", *_measured(name, series)]
        for state, seconds in parts["ready"].items():
            lines += ["", *table([(f"exec to ready, {state}", "s"), *((n, f"{median(s):.2f}") for n, s in
                                                                       seconds.items())], (1,))]  # fmt: skip
        for name, graphs in parts["graphs"].items():
            lines.append(_graphs(name, graphs))
        lines += [f"not run: {name}: {why}" for name, why in parts["missing"].items()]
    lines += [f"interrupted: {what} was not measured" for what in found["unfinished"]]
    return "\n".join(lines)


def _measured(name: str, series: Mapping[str, Any]) -> list[str]:
    rows = [(f"{name}, {series['unit']}", "median", "of the roofline", "speed over the best of transformers")]
    for contender, built in series["contenders"].items():
        of = "–" if built["of_roofline"] is None else f"{built['of_roofline']:.0%}"
        over = f"{built['speed']:.2f} × {built['over']}" if "speed" in built else "–"
        rows.append((contender, f"{built['median']:.3f}", of, over))
    return [*table(rows, (1, 2)), *(f"not run: {who}: {why}" for who, why in series["missing"].items())]


def _graphs(name: str, built: Mapping[str, Any]) -> str:
    line = f"{name}: {built['graphs']} decode graphs ({built['how']})"
    if built["seconds"] is not None:
        line += f", {built['seconds']:.3f} s each, {built['seconds_of_all']:.1f} s in all"
    if built["bytes"] is not None:
        line += f", {built['bytes'] / 2**20:.2f} MiB each, {built['bytes_of_all'] / 2**20:.1f} MiB in all"
    if built["predicted_over_measured"] is not None:
        line += (
            f"; predicted over measured {built['predicted_over_measured']:.2f}, {built['within_15%']:.0%} within 15%"
        )
    return line
