"""A plan as maps: the bucket that serves each request, its padding, and the traffic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import FigureBase
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from numpy.typing import NDArray

from llmc.buckets.bucket import PHASES, Phase
from llmc.buckets.evaluation.replay import PhaseEvaluation
from llmc.buckets.render.figure import LINE, MARK, MISSING, PADDING, PAPER, REAL, percents, powers_of_two
from llmc.buckets.render.text import counted
from llmc.buckets.report.plan_view import Cells, Ints, PlanView, cells, edges, finding, length, spread

LEAST_SHOWN = 16.0
"""The length axis starts where the traffic does, at most this factor below the smallest bucket."""

MAX_LINES = 256
"""Bucket values that are drawn as lines."""


def draw_cumulative(axis: Axes, view: PlanView, phase: Phase, context: int, ticks: int) -> None:
    """Draw the cumulative distribution of real and padded lengths, with a line at each bucket; needs traffic.

    The area between the two curves is the padding: on this axis, the mean of log2(padded / real).
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


Floats = NDArray[np.float64]

MAX_PANELS = 4
"""Contexts of prompt buckets that are drawn, each in a panel of its own."""

MAX_ROWS_NAMED = 10
"""Rows of a map up to which each is labelled with its batches."""

MANY_COLUMNS = 48
"""Columns of a map from which their borders are hairlines."""

PADDING_SCALE = 0.1, 2.0
"""Range of the padding that the darkest colour stands for."""

COLORS = ListedColormap(colormaps["YlOrRd"](np.linspace(0.03, 0.72, 256)))
"""The colours of padding, light enough to see traffic on them."""

DOTS_PER_OCTAVE = 4
"""Traffic is drawn as one dot for a quarter of an octave of lengths and of batches."""

LARGEST_DOT = 45.0
"""Area of the largest dot, in square points."""


def contexts(view: PlanView, phase: Phase) -> list[int]:
    """Return the contexts that have a panel: the most used ones of prompt buckets, or evenly spread ones without
    traffic.

    Decode buckets share one panel with context as its axis; it counts as context 0.
    """
    if phase == "decode":
        return [0]
    found = sorted({bucket.context for bucket in view.plan.prompt})
    requested = view.requested.get(phase, {})
    if requested:
        return sorted(sorted(requested, key=lambda context: -int(requested[context].sum()))[:MAX_PANELS])
    return spread(found, MAX_PANELS)


def height(view: PlanView) -> float:
    """Return the height of `draw` in inches: the phases are side by side where each is one panel."""
    return 3.9 if len(contexts(view, "prompt")) == 1 else 7.2


def darkest(views: Sequence[PlanView], phase: Phase) -> float:
    """Return the padding of the darkest colour: each plan has 98% of its padded tokens in buckets up to it."""
    top, most = PADDING_SCALE
    for view in views:
        result = view.result(phase)
        used = [] if result is None else sorted((use.padding or 0.0, use.share) for use in result.buckets if use.steps)
        if used:
            index = int(np.searchsorted(np.cumsum([share for _, share in used]), 0.98))
            top = max(top, used[min(index, len(used) - 1)][0])
    return min(top, most)


def draw(figure: FigureBase, view: PlanView, scales: Mapping[Phase, float]) -> None:
    """Draw both phases of a plan; the darkest colour of a phase stands for the padding in `scales`."""
    rows = 1 if len(contexts(view, "prompt")) == 1 else 2
    parts = figure.subfigures(rows, 3 - rows, squeeze=False).ravel()
    for part, phase in zip(parts, PHASES, strict=True):
        _draw_phase(part, view, phase, scales[phase])


def _draw_phase(figure: FigureBase, view: PlanView, phase: Phase, darkest: float) -> None:
    shown = contexts(view, phase)
    result = view.result(phase)
    axes = figure.subplots(1, len(shown), squeeze=False, sharey=True)[0]
    left_out = len({bucket.context for bucket in view.plan.prompt}) - len(shown) if phase == "prompt" else 0
    more = f" ({counted(left_out, 'more context')} not drawn)" if left_out else ""
    figure.suptitle(
        f"{finding(view, phase)}{more if len(shown) > 1 else ''}", x=0.01, ha="left", fontsize=10, fontweight="bold"
    )
    one_batch = {bucket.batch for bucket in view.buckets(phase)} == {1}
    ticks = 12 if len(shown) == 1 else 5
    if result is not None and one_batch:
        for axis, context in zip(axes, shown, strict=True):
            draw_cumulative(axis, view, phase, context, ticks)
    else:
        norm = Normalize(0.0, darkest)
        dots = {context: _merged(view, view.steps(phase, context)) for context in shown}
        most = max(int(steps.max()) for steps in dots.values())
        drawn = [_Map(axis, view, phase, context, norm, ticks) for axis, context in zip(axes, shown, strict=True)]
        if most:
            for one, steps in zip(drawn, dots.values(), strict=True):
                one.dots(view, steps, most)
        handles = {label: handle for one in drawn for label, handle in one.legend.items()}
        if handles:
            figure.legend(handles.values(), handles, loc="outside lower left", ncols=len(handles), handletextpad=0.4)
        if result is not None and result.steps:
            top = "max" if max(use.padding or 0.0 for use in result.buckets) > darkest else "neither"
            bar = figure.colorbar(ScalarMappable(norm, COLORS), ax=list(axes), pad=0.01, aspect=30, extend=top)
            bar.set_label("padding of the bucket")
            percents(bar.ax.yaxis)
    if len(shown) > 1 or left_out:
        for axis, context in zip(axes, shown, strict=True):
            requested = "" if result is None else f": {counted(int(view.steps(phase, context).sum()), 'step')}"
            axis.set_title(
                f"context {'up to ' if context else ''}{context:,}{requested}{more if len(shown) == 1 else ''}"
            )
        for axis in axes[1:]:
            axis.set_ylabel("")


class _Map:
    """One panel: cells of lengths (across) and batches (up) in the colour of the bucket that serves them."""

    def __init__(self, axis: Axes, view: PlanView, phase: Phase, context: int, norm: Normalize, ticks: int) -> None:
        self.legend: dict[str, Any] = {}
        self._axis = axis
        grid = cells(view.plan, phase, context)
        across, up = log_edges(grid.lengths), log_edges(grid.batches)
        self._fill(grid, across, up, phase, view.result(phase), norm)
        width = 0.6 if len(across) <= MANY_COLUMNS else 0.3
        axis.add_collection(LineCollection(borders(grid.served, across, up), colors=LINE, linewidths=width))
        self._scale(grid, across, up, view.steps(phase, context).sum(axis=0), view.lengths, ticks)
        axis.set_xlabel("query, tokens" if phase == "prompt" else "context, tokens")
        axis.set_ylabel("batch, sequences")
        for values, name in zip(grid.values, ("batch", "length"), strict=True):
            shown = len(grid.batches if name == "batch" else grid.lengths)
            if shown < values:
                axis.set_xlabel(f"{axis.get_xlabel()} ({shown} of {values:,} {name} values drawn)")

    def _fill(
        self,
        grid: Cells,
        across: Floats,
        up: Floats,
        phase: Phase,
        result: PhaseEvaluation | None,
        norm: Normalize,
    ) -> None:
        def mesh(values: NDArray[Any], where: NDArray[np.bool_], **options: Any) -> None:
            shown = np.ma.masked_where(~where, values)
            self._axis.pcolormesh(across, up, shown, rasterized=values.size > 2000, linewidth=0, **options)

        served = grid.served >= 0
        if result is None:
            mesh(np.zeros(served.shape), served, cmap=ListedColormap([PAPER]))
        else:
            padding = np.array([use.padding or 0.0 for use in result.buckets])[grid.served]
            used = np.array([use.steps > 0 for use in result.buckets])[grid.served]
            mesh(padding, served & used, norm=norm, cmap=COLORS)
            if (served & ~used).any():
                self._hatch(served & ~used, across, up)
                self.legend["never used"] = Patch(facecolor="white", edgecolor=LINE, hatch="////")
        if not served.all():
            mesh(np.zeros(served.shape), ~served, cmap=ListedColormap([MISSING]))
            self.legend["no bucket" + (": prompts are split" if phase == "prompt" else "")] = Patch(facecolor=MISSING)

    def _hatch(self, where: NDArray[np.bool_], across: Floats, up: Floats) -> None:
        for row, line in enumerate(where):
            turns = np.flatnonzero(np.diff(line, prepend=False, append=False)).reshape(-1, 2)
            spans = [(across[begin], across[end] - across[begin]) for begin, end in turns]
            if spans:
                height = up[row], up[row + 1] - up[row]
                self._axis.broken_barh(spans, height, facecolor="none", edgecolor=LINE, linewidth=0, hatch="////")

    def dots(self, view: PlanView, steps: Ints, most: int) -> None:
        """Draw traffic: a dot for each merged cell of `steps`; the largest dot stands for `most` steps."""
        rows, columns = np.nonzero(steps)
        y, x = (np.sqrt(values[:-1] * values[1:]) for values in map(log_edges, _dot_edges(view)))
        sizes = _dot_sizes(steps[rows, columns], most)
        self._axis.scatter(x[columns], y[rows], s=sizes, color=MARK, alpha=0.75, linewidth=0, zorder=5)
        for number in sorted({1, round(most**0.5), most}):
            size = float(_dot_sizes(np.array([number]), most)[0]) ** 0.5
            dot = Line2D([], [], marker="o", linestyle="", color=MARK, alpha=0.75, markeredgewidth=0, markersize=size)
            self.legend[counted(number, "step")] = dot

    def _scale(self, grid: Cells, across: Floats, up: Floats, steps: Ints, lengths: Ints, ticks: int) -> None:
        axis = self._axis
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        powers_of_two(axis.xaxis, ticks)
        powers_of_two(axis.yaxis)
        least = log_edges(lengths)[int(np.argmax(steps > 0))] if steps.any() else across[1] / 2
        axis.set_xlim(max(min(least, across[1] / 2), across[1] / LEAST_SHOWN, 0.5), max(across[-1], 1.0))
        axis.set_ylim(up[0], up[-1])
        if len(grid.batches) <= MAX_ROWS_NAMED:
            lows = [1, *(grid.batches[:-1] + 1).tolist()]
            names = [f"{low}–{high}" if low < high else f"{high}" for low, high in zip(lows, grid.batches, strict=True)]
            axis.set_yticks(np.sqrt(up[:-1] * up[1:]), names)
            axis.tick_params(axis="y", length=0)


def _dot_edges(view: PlanView) -> tuple[Ints, Ints]:
    return edges(int(view.batches[-1]), DOTS_PER_OCTAVE), edges(int(view.lengths[-1]), DOTS_PER_OCTAVE)


def _merged(view: PlanView, steps: Ints) -> Ints:
    """The steps [batches, lengths] in the coarser cells that have a dot each."""
    batches, lengths = _dot_edges(view)
    found = np.zeros((len(batches), len(lengths)), np.int64)
    rows, columns = np.nonzero(steps)
    indices = np.searchsorted(batches, view.batches[rows]), np.searchsorted(lengths, view.lengths[columns])
    np.add.at(found, indices, steps[rows, columns])
    return found


def _dot_sizes(steps: Ints, most: int) -> Floats:
    sizes: Floats = 3.0 + LARGEST_DOT * (np.log1p(steps) / np.log1p(most)) ** 2
    return sizes


def log_edges(values: Ints) -> Floats:
    """Return the edges, on a logarithmic axis, of the intervals that end at each of `values`: one more than values.

    The axis has no 0: a first value of 0 takes the octave below 1, and otherwise everything up to 1 does.
    """
    if values[0] == 0:
        return np.concatenate(([0.25, 0.5], values[1:].astype(np.float64)))
    return np.concatenate(([0.5], values.astype(np.float64)))


def borders(served: Ints, across: Floats, up: Floats) -> list[list[tuple[float, float]]]:
    """Return the lines between cells that different buckets serve, and around all."""
    framed = np.pad(served, 1, constant_values=-2)
    lines: list[list[tuple[float, float]]] = []
    for column, x in enumerate(across):
        differ = framed[1:-1, column] != framed[1:-1, column + 1]
        for begin, end in np.flatnonzero(np.diff(differ, prepend=False, append=False)).reshape(-1, 2):
            lines.append([(x, up[begin]), (x, up[end])])
    for row, y in enumerate(up):
        differ = framed[row, 1:-1] != framed[row + 1, 1:-1]
        for begin, end in np.flatnonzero(np.diff(differ, prepend=False, append=False)).reshape(-1, 2):
            lines.append([(across[begin], y), (across[end], y)])
    return lines
