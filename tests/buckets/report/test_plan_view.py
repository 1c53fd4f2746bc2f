"""The data behind plots: counts of steps, maps of buckets, curves, and the words in titles."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from llmc.buckets.limits import Limits
from llmc.buckets.lookup import prefill_path
from llmc.buckets.planner.choice import FrontierPoint
from llmc.buckets.render.figure import short
from llmc.buckets.render.text import printable, shortened
from llmc.buckets.report.curve import curve
from llmc.buckets.report.maps import borders, contexts, darkest, draw_cumulative, log_edges
from llmc.buckets.report.plan_view import Requested, cells, edges, finding, gather, spread
from llmc.buckets.traffic.events import DecodeRun, PromptGroup
from llmc.buckets.traffic.source import Traffic
from llmc.errors import InputError
from tests.buckets.generators import PROPERTY, small_plans
from tests.buckets.report.test_plots import frontier, grid_plan, plan_of
from tests.buckets.traffic.files import SAMPLE, written


@PROPERTY
@given(st.integers(1, 5000), st.sampled_from([1, 2, 4, 8, 16, 64]))
def test_bins_ascend_to_the_most_and_are_finer_for_more_an_octave(most, per_octave):
    found = edges(most, per_octave).tolist()
    assert found[: 2 * per_octave] == list(range(1, len(found[: 2 * per_octave]) + 1))
    assert all(low < high for low, high in pairwise(found))
    assert found[-1] >= most
    assert len(found) == 1 or found[-2] < most
    assert all((high - low) * per_octave <= max(low, per_octave) for low, high in pairwise(found))
    assert set(found[:-1]) <= set(edges(most, 2 * per_octave).tolist())


@st.composite
def prompt_groups(draw: st.DrawFn) -> PromptGroup:
    lengths = draw(st.lists(st.integers(1, 13), min_size=1, max_size=5))
    return PromptGroup(tuple(lengths), tuple(draw(st.integers(0, length - 1)) for length in lengths))


@st.composite
def decode_runs(draw: st.DrawFn) -> DecodeRun:
    longest = draw(st.integers(1, 13))
    batch = draw(st.integers(1, 5))
    return DecodeRun(batch, longest, longest + batch - 1, draw(st.integers(1, 14 - longest)))


@PROPERTY
@given(small_plans(), st.lists(prompt_groups() | decode_runs(), max_size=12))
def test_the_steps_requested_are_those_of_every_event(plan, events):
    requested = Requested(plan)
    assert list(requested.passing(events)) == events
    known: Counter[tuple[str, int, int, int]] = Counter()
    for event in events:
        if isinstance(event, DecodeRun):
            known.update(("decode", 0, event.batch, event.longest + step) for step in range(event.steps))
            continue
        try:
            path = prefill_path(plan, event.lengths, event.cached)
        except InputError:
            continue
        for step in path:
            longest = max(stop - start for start, stop in step.spans)
            known["prompt", step.bucket.context, len(step.rows), longest] += 1
    found = {
        (phase, context, int(requested.batches[row]), int(requested.lengths[column])): int(counts[row, column])
        for phase in ("prompt", "decode")
        for context, counts in requested.counts(phase).items()
        for row, column in zip(*np.nonzero(counts), strict=True)
    }
    assert found == known


def test_long_decode_runs_are_binned_exactly():
    plan = plan_of(Limits(10_000, 40), [(1, 10_000, 0)], [(40, 10_000)])
    requested = Requested(plan)
    runs = [DecodeRun(batch, 1 + 37 * batch, 40 * batch * batch, 5000 + batch) for batch in (1, 33, 34, 40)]
    assert list(requested.passing(runs)) == runs
    counts = requested.counts("decode")[0]
    naive = np.zeros_like(counts)
    for run in runs:
        indices = np.searchsorted(requested.lengths, np.arange(run.longest, run.longest + run.steps))
        np.add.at(naive, (np.searchsorted(requested.batches, run.batch), indices), 1)
    assert (counts == naive).all()


@PROPERTY
@given(small_plans(), st.integers(0, 12), st.sampled_from(["prompt", "decode"]))
def test_a_cell_is_served_by_one_bucket_which_is_that_of_lookup(plan, context, phase):
    known = plan.prompt if phase == "prompt" else plan.decode
    context = context if phase == "prompt" else 0
    if all(bucket.context < context for bucket in known):
        return
    grid = cells(plan, phase, context)
    assert grid.values == grid.served.shape
    for batch, length in product(range(1, int(grid.batches[-1]) + 1), range(1, int(grid.lengths[-1]) + 1)):
        index = grid.served[np.searchsorted(grid.batches, batch), np.searchsorted(grid.lengths, length)]
        shape = (length, context) if phase == "prompt" else (1, length)
        assert (None if index < 0 else known[index]) == plan.lookup(phase, batch, *shape)


@PROPERTY
@given(st.integers(1, 5), st.integers(1, 5), st.data())
def test_borders_are_where_neighbours_differ(rows, columns, data):
    served = np.array(
        data.draw(
            st.lists(st.lists(st.integers(-1, 2), min_size=columns, max_size=columns), min_size=rows, max_size=rows)
        )
    )
    across, up = (log_edges(np.arange(1, size + 1)) for size in (columns, rows))
    found: Counter[tuple[str, int, int]] = Counter()
    for (x, low), (right, high) in borders(served, across, up):
        assert x == right or low == high
        if x == right:
            begin, end = (int(np.searchsorted(up, value)) for value in (low, high))
            found.update(("|", int(np.searchsorted(across, x)), row) for row in range(begin, end))
        else:
            begin, end = (int(np.searchsorted(across, value)) for value in (x, right))
            found.update(("-", column, int(np.searchsorted(up, low))) for column in range(begin, end))
    framed = np.pad(served, 1, constant_values=-2)
    upright = {("|", x, y) for y in range(rows) for x in range(columns + 1) if framed[y + 1, x] != framed[y + 1, x + 1]}
    level = {("-", x, y) for y in range(rows + 1) for x in range(columns) if framed[y, x + 1] != framed[y + 1, x + 1]}
    assert found == Counter(upright | level)


def test_the_contexts_with_most_steps_have_a_panel():
    plan = grid_plan(1, contexts=(0, 128, 256, 512, 1024, 2048))
    assert contexts(gather([("plan", plan)], None)[0], "prompt") == [0, 128, 512, 2048]
    (view,) = gather([("plan", plan)], Traffic(SAMPLE))
    assert contexts(view, "prompt") == [0]
    assert contexts(view, "decode") == [0]


def test_the_title_says_what_was_found(tmp_path):
    trace = written(tmp_path, "trace.csv", "ContextTokens,GeneratedTokens\n100,1\n100,3\n")
    plan = plan_of(Limits(256, 1), [(1, 128, 0)], [(1, 255)])
    (view,) = gather([("plan", plan)], Traffic(trace))
    assert finding(view, "prompt") == "prompt: 28.0% padding over 2 steps, 1 bucket"
    assert finding(view, "decode") == "decode: 153.7% padding over 2 steps, 1 bucket"
    assert finding(gather([("plan", plan)], None)[0], "prompt") == "prompt: 1 bucket"
    narrow = plan_of(Limits(256, 1), [(1, 64, 0)], [(1, 100)])
    (view,) = gather([("plan", narrow)], Traffic(trace))
    assert finding(view, "prompt") == "prompt: 1 bucket, the traffic takes no step, 2 requests uncovered"
    assert finding(view, "decode") == "decode: 0.0% padding over 1 step, 1 bucket, 1 step uncovered"


def test_the_area_between_the_cumulative_curves_is_the_padding(tmp_path):
    trace = written(tmp_path, "trace.csv", "ContextTokens,GeneratedTokens\n32,1\n64,1\n90,1\n128,1\n")
    (view,) = gather([("plan", plan_of(Limits(256, 1), [(1, 64, 0), (1, 256, 0)], [(1, 256)]))], Traffic(trace))
    axis = Figure().add_subplot()
    draw_cumulative(axis, view, "prompt", 0, 12)
    real, padded = (line.get_xydata() for line in axis.lines)
    gap = real[:-1, 1] - padded[:-1, 1]
    assert gap.min() >= 0
    area = float((gap * np.diff(np.log2(real[:, 0]))).sum())
    assert area == pytest.approx(np.log2([64 / 32, 1, 256 / 90, 256 / 128]).mean())


def test_the_darkest_colour_leaves_out_what_is_rare(tmp_path):
    rows = "".join("128,1\n" * 1999) + "1,1\n"
    trace = written(tmp_path, "trace.csv", "ContextTokens,GeneratedTokens\n" + rows)
    plan = plan_of(Limits(256, 1), [(1, 100, 0), (1, 160, 0), (1, 256, 0)], [(1, 256)])
    views = gather([("plan", plan)], Traffic(trace))
    assert darkest(views, "prompt") == pytest.approx(0.25)
    assert darkest(views, "decode") == 0.1


def test_the_curve_is_by_the_graphs_used_with_the_bound_scaled_from_the_cost():
    points = frontier()
    points.append(FrontierPoint(16, points[-1].chosen))
    assert [point.graphs for point in curve(points, "decode")] == [1, 2, 8]
    assert [point.padding for point in curve(points, "decode")] == [3.0, 1.5, 0.375]
    assert curve(points, "prompt")[1].bound == pytest.approx(2.5 / 1.1 - 1)
    assert curve([], "prompt") == []


def test_some_values_are_evenly_spread_and_texts_are_cut_in_the_middle():
    assert spread(range(100), 4) == [0, 33, 66, 99]
    assert spread([1, 2, 3], 4) == [1, 2, 3]
    assert shortened("0123456789", 10) == "0123456789"
    assert shortened("0123456789a", 10) == "012345…89a"
    assert printable("a\x00b\nc中") == "a?b?c中"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0, "0"), (999, "999"), (1e3, "1k"), (12_345, "12.3k"), (1e6, "1M"), (-2e6, "-2M"), (1e9, "1G"), (1e12, "1T"),
        (1e15, "1P"),
    ],
)  # fmt: skip
def test_a_number_has_three_digits_and_its_unit(value, said):
    assert short(value) == said
