"""One-dimensional buckets: how the lengths of traffic are distributed, and what padding makes of them."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes

from llmc.buckets.bucket import Phase
from llmc.buckets.plots.data import PlanView, counted, length, spread
from llmc.buckets.plots.style import LINE, PADDING, REAL, percents, powers_of_two

LEAST_SHOWN = 16.0
"""The axis of lengths starts where the traffic does, but not more than this factor below the smallest bucket."""

MAX_LINES = 256
"""Bucket values that are drawn as lines."""


def draw_cumulative(axis: Axes, view: PlanView, phase: Phase, context: int, ticks: int) -> None:
    """The cumulative distribution of real and of padded lengths, with a line at each bucket; needs traffic.

    Between the two curves lies the padding: on this axis the area is the mean of log2(padded / real).
    """
    result = view.result(phase)
    uses = (
        [] if result is None else [use for use in result.buckets if phase == "decode" or use.bucket.context == context]
    )
    steps = view.steps(phase, context).sum(axis=0)
    values = sorted({length(use.bucket) for use in uses})
    lines = spread(values, MAX_LINES)
    axis.vlines(lines, 0, 1, color=LINE, linewidth=0.6, zorder=1, label=counted(len(values), "bucket"))
    total = int(steps.sum())
    least = values[0] / 2
    if total:
        served = np.zeros(len(values))
        np.add.at(served, np.searchsorted(values, [length(use.bucket) for use in uses]), [use.steps for use in uses])
        at = np.union1d(view.lengths, values)
        real, padded = (
            np.concatenate(([0.0], np.cumsum(counts)))[np.searchsorted(known, at, "right")] / total
            for known, counts in ((view.lengths, steps), (np.array(values), served))
        )
        least = max(min(least, float(view.lengths[int(np.argmax(steps > 0))])), values[0] / LEAST_SHOWN)
        axis.fill_between(at, real, padded, step="post", color=PADDING, alpha=0.45, linewidth=0, label="padding")
        axis.step(at, real, where="post", color=REAL, linewidth=1.6, label="real length")
        axis.step(at, padded, where="post", color=PADDING, linewidth=1.0, label="padded length")
    axis.set_xscale("log", base=2)
    powers_of_two(axis.xaxis, ticks)
    percents(axis.yaxis)
    axis.set_xlim(max(least, 0.5), max(values[-1], 1))
    axis.set_ylim(0, 1.01)
    axis.set_xlabel("query, tokens" if phase == "prompt" else "context, tokens")
    axis.set_ylabel("share of steps")
    axis.legend(loc="upper left", facecolor="white", frameon=True, framealpha=0.9, edgecolor="none")
