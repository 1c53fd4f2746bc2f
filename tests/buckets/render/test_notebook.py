"""What notebooks show of plans, evaluations and benches: grids and tables, whole, bounded and escaped."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest

import llmc
from llmc.buckets.bucket import Bucket
from llmc.buckets.cost.bench import Bench, Measurement
from llmc.buckets.plan import DARKEST, MOST, Plan, grids
from llmc.buckets.render.page import Table, columns, fragment
from llmc.buckets.traffic.source import Traffic
from llmc.errors import InputError

LIMITS = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 1024, "block_size": 32}


class Rows(HTMLParser):
    """The texts of cells by row, and the elements that are open; no element may be left open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.open: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def plan() -> Plan:
    return llmc.plan(**LIMITS)


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    path = tmp_path / "requests.csv"
    path.write_text("arrived_s,prompt_tokens,output_tokens\n0,40,8\n1,100,4\n9,400,4\n")
    return path


def test_a_plan_is_a_grid_of_how_many_graphs_are_where(plan: Plan) -> None:
    text = plan._repr_html_()
    assert f"A plan of {len(plan.buckets)} graphs (linear)" in text and "max_model_len 256" in text
    rows = Rows(text).rows
    head = next(row for row in rows if row[0] == "batch \\ new tokens")
    assert head[1:] == [str(query) for query in sorted({bucket.query for bucket in plan.prompt})]
    counted = sum(int(cell) for row in rows if row not in (head,) and row[0].isdigit() for cell in row[1:] if cell)
    assert counted == len(plan.buckets)


def test_many_values_share_rows_and_columns_and_more_tokens_are_darker() -> None:
    prompt = [Bucket("prompt", batch, query, 0) for batch in range(1, 101) for query in range(1, 301)]
    found, empty = grids(prompt, [Bucket("decode", 1, 1, 0)])
    assert len(found.rows) <= MOST and len(found.columns) <= MOST
    assert sum(map(sum, found.numbers)) == len(prompt)
    assert found.columns[0] == "1–19" and found.rows[-1].endswith("–100")
    assert found.shades[-1][-1] == pytest.approx(DARKEST) and found.shades[0][0] < found.shades[0][1]
    assert empty.columns == ["0"]


def test_an_evaluation_shows_padding_by_phase_and_the_buckets_that_pad(plan: Plan, requests: Path) -> None:
    found = llmc.evaluate(plan, requests, clip=True)
    assert found.prompt.requests == 3 and found == llmc.evaluate(plan, Traffic(requests, clip=True))
    text = found._repr_html_()
    rows = Rows(text).rows
    prompt = next(row for row in rows if row[0] == "prompt")
    assert prompt[4] == f"{found.prompt.padding:,.1%}" and prompt[3] == str(found.prompt.steps)
    hottest = found.decode.hottest(1)[0]
    assert list(hottest.cells()) in rows
    assert llmc.evaluate(plan, requests).prompt.requests == 2, "requests above the limits are left out"


def test_files_are_read_and_what_a_traffic_says_itself_is_refused(plan: Plan, requests: Path, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    bench = Bench("cpu", tuple(Measurement(bucket, 0.01) for bucket in plan.buckets))
    bench.save(tmp_path / "bench.json")
    found = llmc.evaluate(tmp_path / "plan.json", str(requests), bench=tmp_path / "bench.json", arrival_rate=2.0)
    assert found.prompt.seconds is not None and found.prompt.seconds > 0
    with pytest.raises(InputError, match="set them there"):
        llmc.evaluate(plan, Traffic(requests), clip=True)
    with pytest.raises(InputError, match="gone"):
        llmc.evaluate(plan, tmp_path / "gone.csv")


def test_a_bench_is_a_table_of_bounded_length(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmc.buckets.cost.bench.SHOWN", 3)
    bench = Bench("cpu", tuple(Measurement(bucket, 0.25) for bucket in plan.buckets), more={"unmeasured": ["x"]})
    text = bench._repr_html_()
    rows = Rows(text).rows
    first = bench.measurements[0].bucket
    assert rows[1][-2:] == ["250.00", f"{first.tokens * 4}"] and len(rows) == 4
    assert f"{len(plan.buckets) - 3} more are left out" in text and "interrupted: 1 bucket " in text


def test_all_text_is_escaped() -> None:
    bad = "<script>alert(1)</script>"
    text = fragment(bad, [bad], [Table(bad, columns((bad,), 1), [(bad,)], bad)])
    assert "<script" not in text and text.count("&lt;script&gt;") == 6
