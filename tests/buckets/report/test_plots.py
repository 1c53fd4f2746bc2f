"""Drawing plans: pictures and pages that are whole, the same every time, and say what was measured."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections import Counter
from html.parser import HTMLParser
from itertools import product
from pathlib import Path

import matplotlib
import numpy as np
import pytest

from llmc.buckets.bucket import Bucket
from llmc.buckets.evaluation.replay import replay
from llmc.buckets.limits import Limits
from llmc.buckets.plan import Note, Plan, Provenance
from llmc.buckets.planner.choice import Chosen, FrontierPoint
from llmc.buckets.render.figure import svg
from llmc.buckets.render.text import printable
from llmc.buckets.report.maps import log_edges
from llmc.buckets.report.plan_page import MAX_ROWS, draw, plots, title
from llmc.buckets.report.plan_view import gather
from llmc.buckets.traffic.source import Traffic
from llmc.errors import DeviceError, InputError
from llmc.files import write_bytes
from llmc.platforms import install_line
from tests.buckets.traffic.files import SAMPLE, written
from tests.tiers import full

NASTY = '<script>alert("1")</script> & $x^ id="b" \x00\n中'
VOID = {"meta", "br", "link", "img", "hr", "input"}


def plan_of(limits: Limits, prompt: list[tuple[int, int, int]], decode: list[tuple[int, int]], *notes: Note) -> Plan:
    known = [Bucket("prompt", *row) for row in prompt] + [Bucket("decode", batch, 1, rest) for batch, rest in decode]
    return Plan(limits, tuple(known), Provenance("by hand", notes=notes))


def grid_plan(seqs: int = 4, contexts: tuple[int, ...] = (0,)) -> Plan:
    """Powers of two up to 4096 tokens and `seqs` sequences."""
    lengths = [1 << index for index in range(7, 13)]
    batches = [1 << index for index in range(seqs.bit_length())]
    prompt = list(product(batches, lengths, contexts))
    note = Note("added", "a <b>top</b>", "prompt", 1)
    return plan_of(Limits(4096, seqs), prompt, list(product(batches, lengths)), note)


def frontier() -> list[FrontierPoint]:
    def chosen(phase: str, graphs: int) -> Chosen:
        known = [Bucket(phase, 1, 1, 64 * (index + 1)) for index in range(graphs)]
        return Chosen(tuple(known), cost=110.0, bound=100.0, padding=3.0 / graphs, ragged=0.01)

    return [
        FrontierPoint(graphs, {phase: chosen(phase, graphs) for phase in ("prompt", "decode")}) for graphs in (1, 2, 8)
    ]


class Page(HTMLParser):
    """The headings, the tables' rows and the ids of a page; checks that every tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: Counter[str] = Counter()
        self.rows: list[list[str]] = []
        self.headings: list[str] = []
        self.scripts = 0
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.scripts += tag == "script"
        self.ids.update(value for name, value in attributes if name == "id")
        if tag == "tr":
            self.rows.append([])
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.ids.update(value for name, value in attributes if name == "id")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "td":
            self.rows[-1].append(data)
        if self.open and self.open[-1] in ("h1", "h2", "h3"):
            self.headings.append(data)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> tuple[Path, Path]:
    """Two plans with a nasty name and a frontier, on traffic: as a page and as a picture."""
    folder = tmp_path_factory.mktemp("plots")
    plans = [(NASTY, grid_plan()), ("one", grid_plan(1))]
    for name in ("page.html", "picture.png"):
        draw(folder / name, plans, Traffic(SAMPLE), frontier())
    return folder / "page.html", folder / "picture.png"


@full
def test_a_picture_is_a_png_of_every_plot(drawn):
    content = drawn[1].read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(content[at : at + 4], "big") for at in (16, 20))
    assert width == 1320
    assert 1500 < height < 4000
    assert 50_000 < len(content) < 2_000_000


def test_a_page_is_well_formed_and_its_ids_are_unique(drawn):
    page = Page(drawn[0].read_text())
    assert page.scripts == 1
    assert page.ids
    assert set(page.ids.values()) == {1}
    references = re.findall(r'(?:href="#|url\(#)([^")]+)', drawn[0].read_text())
    assert references
    assert set(references) <= set(page.ids)


def test_a_page_refers_to_nothing_outside_it(drawn):
    text = drawn[0].read_text()
    known = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert set(re.findall(r"[a-z]+://[^\s\"'<>]+", text)) == known
    assert "@import" not in text
    assert re.search(r"\bsrc=", text) is None


def test_a_page_has_the_numbers_of_the_evaluation_and_of_the_frontier(drawn):
    page = Page(drawn[0].read_text())
    for name, plan in ((printable(NASTY), grid_plan()), ("one", grid_plan(1))):
        result = replay(plan, Traffic(SAMPLE))
        for phase in (result.prompt, result.decode):
            row = [f"{count:,}" for count in (len(phase.buckets), phase.requests, phase.steps)]
            all_padding = (phase.padding, phase.ragged_padding, phase.padding_p50, phase.padding_p95, phase.padding_p99)
            row += [*(f"{padding:,.1%}" for padding in all_padding), f"{len(phase.unused)}", f"{phase.uncovered}"]
            assert phase.steps
            assert page.rows.count([name, phase.phase, *row]) == 2
            for use in phase.buckets:
                known = (use.bucket.batch, use.bucket.query, use.bucket.context)
                counts = (use.steps, use.requests, use.real_tokens, use.padded_tokens)
                padding = "–" if use.padding is None else f"{use.padding:,.1%}"
                assert [*(f"{count:,}" for count in (*known, *counts)), padding, f"{use.share:,.1%}"] in page.rows
    assert ["8", *(["8", "37.5%", "1.0%", "10.0%"] * 2)] in page.rows


def test_what_people_write_is_escaped_everywhere(drawn):
    text = drawn[0].read_text()
    shown = printable(NASTY)
    assert "\x00" not in text
    assert "<script>alert" not in text
    assert "<b>top" not in text
    page = Page(text)
    assert any(row[0] == shown for row in page.rows if row)
    assert shown in page.headings
    assert "a <b>top</b>" in text.replace("&lt;", "<").replace("&gt;", ">")


@full
def test_equal_arguments_give_equal_bytes_whatever_the_users_style_is(drawn, tmp_path):
    plans = [(NASTY, grid_plan()), ("one", grid_plan(1))]
    draw(tmp_path / "first.png", plans[1:], None, [])
    with matplotlib.rc_context({"font.size": 20, "svg.hashsalt": "other", "axes.facecolor": "red"}):
        draw(tmp_path / "page.html", plans, Traffic(SAMPLE), frontier())
        draw(tmp_path / "second.png", plans[1:], None, [])
        assert matplotlib.rcParams["font.size"] == 20
    assert (tmp_path / "page.html").read_bytes() == drawn[0].read_bytes()
    assert (tmp_path / "second.png").read_bytes() == (tmp_path / "first.png").read_bytes()


def test_a_plan_is_drawn_without_traffic_and_without_a_frontier(tmp_path):
    plan = grid_plan(2, contexts=(0, 512, 1024, 2048, 3072, 3584))
    for name in ("a.png", "a.HTML"):
        draw(tmp_path / name, [("plan", plan)], None, [])
    page = Page((tmp_path / "a.HTML").read_text())
    assert page.headings[:2] == [
        "by hand: max_model_len 4,096, max_num_seqs 2, max_num_batched_tokens 8,192, block_size 128",
        "plan: the bucket that serves each request",
    ]
    assert "prompt: 72 buckets (2 more contexts not drawn)" in (tmp_path / "a.HTML").read_text()
    assert "On the traffic" not in page.headings


def test_of_many_plans_all_are_compared_and_some_drawn(tmp_path):
    trace = written(tmp_path, "trace.csv", "ContextTokens,GeneratedTokens\n200,5\n")
    views = gather([(f"plan {number}", grid_plan(1)) for number in range(14)], Traffic(trace))
    found = plots(views, [])
    assert found[0].heading == "14 plans on the same traffic, the first 12 of them"
    assert len(found) == 1 + 4 * 2
    assert title(views).endswith("(the first 4 in detail)")
    assert "plan 11" in (drawing := svg(found[0], "p-"))
    assert "plan 12" not in drawing


@full
def test_a_plan_of_ten_thousand_buckets_is_drawn_in_part(tmp_path):
    limits = Limits(65536, 128)
    pairs = list(product(range(1, 65), range(256, 65537, 400)))
    plan = plan_of(
        limits, [*((*pair, 0) for pair in pairs if pair[1] < 65536), (128, 65536, 0)], [*pairs, (128, 65536)]
    )
    assert len(plan.prompt) > 10_000
    start = time.perf_counter()
    draw(tmp_path / "large.html", [("large", plan)], Traffic(SAMPLE), [])
    assert time.perf_counter() - start < 30
    text = (tmp_path / "large.html").read_text()
    assert text.count(f"{len(plan.prompt) - MAX_ROWS:,} more are left out; the plan file has all of them.") == 2
    assert len(text) < 5_000_000
    assert "of the plan" not in text


def test_values_that_are_too_many_are_drawn_in_part_and_the_axis_says_so():
    limits = Limits(2048, 300)
    rows = [(batch, 2048, 0) for batch in range(1, 301)]
    plan = plan_of(limits, rows, [(300, length) for length in range(4, 2049, 4)])
    text = svg(plots(gather([("plan", plan)], None), [])[0], "p-")
    assert "query, tokens (100 of 300 batch values drawn)" in text
    assert "context, tokens (256 of 512 length values drawn)" in text


@full
def test_traffic_that_requests_nothing_is_drawn(tmp_path):
    trace = written(tmp_path, "trace.csv", "ContextTokens,GeneratedTokens\n200,1\n")
    for seqs in (1, 4):
        plan = plan_of(Limits(256, seqs), [(seqs, 128, 0)], [(seqs, 256)])
        draw(tmp_path / f"{seqs}.html", [("a", plan), ("b", plan)], Traffic(trace), [])
        text = (tmp_path / f"{seqs}.html").read_text()
        assert "prompt: none of 1 bucket is used" in text
        assert "prompt: 1 bucket, the traffic takes no step, 1 request uncovered" in text
        assert "decode: the traffic takes no step" in text


def test_a_plan_with_a_context_of_0_has_it_below_1_on_the_axis(tmp_path):
    plan = plan_of(Limits(64, 2), [(2, 64, 0)], [(1, 0), (2, 0), (2, 64)])
    draw(tmp_path / "zero.png", [("zero", plan)], None, [])
    only = plan_of(Limits(64, 1), [(1, 64, 0)], [(1, 0)])
    trace = written(tmp_path, "short.csv", "ContextTokens,GeneratedTokens\n5,10\n")
    draw(tmp_path / "only.png", [("only", only)], None, [])
    draw(tmp_path / "only.png", [("only", only)], Traffic(trace), [])
    assert log_edges(np.array([0, 8])).tolist() == [0.25, 0.5, 8]


def test_a_frontier_without_padding_is_drawn():
    choice = Chosen((Bucket("prompt", 1, 1, 0),), cost=0.0, bound=0.0, padding=None, ragged=0.0)
    known = frontier()[0].chosen["decode"]
    (view,) = gather([("plan", grid_plan(1))], None)
    text = svg(plots([view], [FrontierPoint(1, {"prompt": choice, "decode": known})])[-1], "p-")
    assert "prompt: the traffic takes no step" in text
    assert "decode: 300.0% padding with 1 graph" in text


# what cannot be drawn


def test_another_suffix_is_refused_with_the_two_that_are_known(tmp_path):
    with pytest.raises(InputError, match=r"cannot draw to .*plan\.pdf: give a file name that ends in \.png or \.html"):
        draw(tmp_path / "plan.pdf", [("plan", grid_plan())], None, [])


def test_no_plan_is_refused(tmp_path):
    with pytest.raises(InputError, match="no plan to draw"):
        draw(tmp_path / "plan.png", [], None, [])


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InputError, match=r"cannot write the plots to .*none/plan\.html: No such file"):
        draw(tmp_path / "none" / "plan.html", [("plan", grid_plan(1))], None, [])


def test_without_matplotlib_the_error_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(
        DeviceError, match=rf"matplotlib is not installed; install it with: {re.escape(install_line('plot'))}"
    ):
        draw(tmp_path / "plan.html", [("plan", grid_plan())], None, [])


def test_importing_the_package_does_not_import_matplotlib():
    code = "import sys, llmc.buckets.report.plan_page; sys.exit('matplotlib' in sys.modules or 'jinja2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_bytes_are_written_whole_and_leave_no_other_file(tmp_path):
    target = tmp_path / "file.bin"
    write_bytes(target, b"old", "plots")
    write_bytes(target, b"\x00\r\n\xff", "plots")
    assert target.read_bytes() == b"\x00\r\n\xff"
    assert target.stat().st_mode & 0o777 == 0o644
    assert list(tmp_path.iterdir()) == [target]
