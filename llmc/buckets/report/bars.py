"""Bar plots: the padding of one plan by bucket, and a comparison of several plans."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import FigureBase
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from llmc.buckets.bucket import PHASES, Phase
from llmc.buckets.evaluation.replay import PhaseEvaluation
from llmc.buckets.render.figure import FAINT, INK, MISSING, PADDING, REAL, percents, tokens
from llmc.buckets.render.text import counted, percent, shortened
from llmc.buckets.report.plan_view import PlanView
from llmc.buckets.report.text import shape

HOTTEST = 15
"""Buckets whose padding is drawn, those with the most padded tokens."""

MAX_COMPARED = 12
"""Plans that are compared."""

FARTHEST = 2.0
"""Percentiles above this many times the largest padding are written, not drawn."""

BAR = 0.21
"""Inches of a bar and its gap."""


def padding_height(view: PlanView) -> float:
    """Return the height of `draw_padding` in inches."""
    most = max(len(result.hottest(HOTTEST)) for phase in PHASES if (result := view.result(phase)))
    return 1.3 + BAR * max(most, 3)


def draw_padding(figure: FigureBase, view: PlanView) -> None:
    """Draw real and padding tokens of the hottest buckets of both phases; needs traffic."""
    for axis, phase in zip(figure.subplots(1, 2), PHASES, strict=True):
        result = view.result(phase)
        if result is not None:
            _draw_hottest(axis, result)


def _draw_hottest(axis: Axes, result: PhaseEvaluation) -> None:
    used = result.hottest(HOTTEST)
    buckets = counted(len(result.buckets), "bucket")
    if not used:
        axis.set_title(f"{result.phase}: none of {buckets} is used", fontweight="bold")
        axis.set_axis_off()
        return
    share = percent(sum(use.share for use in used))
    axis.set_title(
        f"{result.phase}: {len(used)} of {buckets} hold {share} of tokens, {len(result.unused):,} unused",
        fontweight="bold",
    )
    indices = range(len(used))
    real = [use.real_tokens for use in used]
    padding = [use.padded_tokens - use.real_tokens for use in used]
    axis.barh(indices, real, height=0.74, color=REAL, label="real")
    axis.barh(indices, padding, left=real, height=0.74, color=PADDING, label="padding")
    for index, use in enumerate(used):
        axis.annotate(
            percent(use.padding),
            (use.padded_tokens, index),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axis.set_yticks(indices, [shape(use.bucket) for use in used], fontsize=8)
    axis.tick_params(axis="y", length=0)
    axis.set_ylim(len(used) - 0.4, -0.6)
    axis.set_xlim(0, max(use.padded_tokens for use in used) * 1.14)
    axis.set_ylabel("batch x query + context")
    axis.set_xlabel("new tokens computed" if result.phase == "prompt" else "cached tokens read")
    tokens(axis.xaxis)
    axis.legend(loc="lower right")


def comparison_height(views: Sequence[PlanView]) -> float:
    """Return the height of `draw_comparison` in inches."""
    return 1.5 + 2 * BAR * min(len(views), MAX_COMPARED)


def draw_comparison(figure: FigureBase, views: Sequence[PlanView]) -> None:
    """Draw the padding of each plan, by phase, and the percentiles of its steps; needs traffic."""
    shown = views[:MAX_COMPARED]
    axes = figure.subplots(1, 2, sharey=True)
    for axis, phase in zip(axes, PHASES, strict=True):
        _draw_all_padding(axis, shown, phase)
    axes[1].tick_params(axis="y", length=0, labelleft=False)
    figure.legend(
        handles=[
            Patch(color=PADDING, label="added by the buckets"),
            Patch(color=MISSING, label="ragged: unequal lengths in a step, whatever the buckets"),
            Line2D([], [], color=INK, linestyle="", marker="|", markersize=7, label="p50 of the steps"),
            Line2D([], [], color=INK, linestyle="", marker="x", markersize=7, label="p95 of the steps"),
        ],
        loc="outside lower left",
        ncols=4,
    )


def _draw_all_padding(axis: Axes, views: Sequence[PlanView], phase: Phase) -> None:
    results = [result for view in views if (result := view.result(phase)) is not None]
    most = max((result.padding or 0.0 for result in results), default=0.0) or 0.01
    for index, result in enumerate(results):
        padding = result.padding or 0.0
        ragged = min(result.ragged_padding or 0.0, padding)
        axis.barh(index, ragged, height=0.62, color=MISSING)
        axis.barh(index, padding - ragged, left=ragged, height=0.62, color=PADDING)
        marks = ((result.padding_p50, "|"), (result.padding_p95, "x"))
        drawn = [padding]
        for percentile, marker in marks:
            if percentile is not None and percentile <= FARTHEST * most:
                axis.plot([percentile], [index], marker=marker, color=INK, markersize=7, linestyle="", clip_on=False)
                drawn.append(percentile)
        label = f"{percent(result.padding)}, {counted(len(result.buckets), 'graph')}"
        if result.padding_p95 is not None and result.padding_p95 > FARTHEST * most:
            label += f" (p95 {percent(result.padding_p95)})"
        axis.annotate(label, (max(drawn), index), (8, 0), textcoords="offset points", va="center", fontsize=8)
    axis.set_yticks(range(len(views)), [shortened(view.name, 28) for view in views])
    axis.tick_params(axis="y", length=0)
    axis.set_ylim(len(views) - 0.4, -0.6)
    reach = [value for r in results for value in (r.padding_p50, r.padding_p95) if value and value <= FARTHEST * most]
    axis.set_xlim(0, max([most, *reach]) * 1.55)
    percents(axis.xaxis)
    axis.set_xlabel("padding: padding / real tokens", color=FAINT)
    axis.set_title(_verdict(views, phase), fontweight="bold")


def _verdict(views: Sequence[PlanView], phase: Phase) -> str:
    known = [(result.padding, view) for view in views if (result := view.result(phase)) and result.padding is not None]
    if not known:
        return f"{phase}: the traffic takes no step"
    padding, view = min(known, key=lambda pair: pair[0] or 0.0)
    graphs = counted(len(view.buckets(phase)), "graph")
    return f"{phase}: {shortened(view.name, 28)} pads least, {percent(padding)} with {graphs}"
