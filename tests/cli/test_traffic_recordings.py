"""`llmc traffic merge`, `sample` and `anonymise`, as typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmc.buckets.traffic.events import TrafficRequest
from llmc.buckets.traffic.reader import Trace
from tests.buckets.traffic.files import SAMPLE
from tests.buckets.traffic.formats.logs import generated, received, scrape
from tests.cli.helpers import Llmc

HEAD = "time,prompt_tokens,output_tokens\n"


def test_logs_of_several_servers_are_merged_by_their_times(llmc: Llmc) -> None:
    Path("a.csv").write_text(HEAD + "2026-11-23T12:00:00Z,1,1\n2026-11-23T12:00:10Z,2,1\n")
    Path("b.log").write_text('{"created": 1795435205, "usage": {"prompt_tokens": 9, "completion_tokens": 4}}\n')
    ran = llmc("traffic", "merge", "a.csv", "b.log", "-o", "all.jsonl")
    assert ran.out == "merged 3 requests to all.jsonl\n"
    trace = Trace("all.jsonl")
    assert list(trace) == [TrafficRequest(0, 1, 1), TrafficRequest(5, 9, 4), TrafficRequest(10, 2, 1)]
    assert trace.start is not None and trace.start == (1795435200, "utc")


def test_a_part_is_drawn_the_same_each_time(llmc: Llmc) -> None:
    for name, seed in (("one", 7), ("two", 7), ("three", 8)):
        assert llmc("traffic", "sample", SAMPLE, "-n", 100, "--seed", seed, "-o", f"{name}.jsonl.gz").code == 0
    assert Path("one.jsonl.gz").read_bytes() == Path("two.jsonl.gz").read_bytes()
    assert Path("one.jsonl.gz").read_bytes() != Path("three.jsonl.gz").read_bytes()
    assert len(list(Trace("one.jsonl.gz"))) == 100
    found = llmc("traffic", "sample", SAMPLE, "--share", "10%", "-o", "part.jsonl", "--json").json
    assert 100 < found["requests"] < 200


def test_the_rate_of_the_whole_is_said(llmc: Llmc) -> None:
    rate = Trace(SAMPLE).summary().rate
    assert f"plan with --arrival-rate {rate:.3g}" in llmc("traffic", "sample", SAMPLE, "-n", 5, "-o", "p").err


def test_nothing_of_people_is_left(llmc: Llmc) -> None:
    secrets = ("chatcmpl-secret", "Grandma's address", "temperature")
    Path("server.log").write_text(
        "\n".join([received("chatcmpl-secret", 33, 5, "Grandma's address"), generated("chatcmpl-secret", 7, 9)])
    )
    ran = llmc("traffic", "anonymise", "server.log", "--round-to", 16, "-o", "out.jsonl")
    assert ran.code == 0
    text = Path("out.jsonl").read_text()
    assert json.loads(text) == {"time": 0.0, "prompt_tokens": 48, "output_tokens": 16}
    assert not any(secret in text for secret in secrets)


def test_times_are_moved_and_stay_in_order(llmc: Llmc) -> None:
    assert llmc("traffic", "anonymise", SAMPLE, "--jitter", "3s", "-o", "moved.jsonl").code == 0
    before, after = list(Trace(SAMPLE)), [json.loads(line) for line in Path("moved.jsonl").read_text().splitlines()]
    times = [one["time"] for one in after]
    assert times == sorted(times) and len(after) == len(before)
    assert sorted(one["prompt_tokens"] for one in after) == sorted(request.prompt for request in before)
    assert all(abs(time - request.time) <= 3.001 for time, request in zip(times, before, strict=True))


def test_a_file_can_replace_itself_and_an_error_leaves_it(llmc: Llmc) -> None:
    Path("t.csv").write_text(HEAD + "5,3,2\n6,4,2\n")
    assert llmc("traffic", "anonymise", "t.csv", "-o", "t.csv").code == 0
    whole = Path("t.csv").read_text()
    assert whole.startswith('{"time": 0.0, "prompt_tokens": 3')
    Path("torn.csv").write_text(HEAD + "5,3,2\n6,4\n")
    assert "line 3" in llmc("traffic", "anonymise", "torn.csv", "-o", "t.csv").failed(2)
    assert Path("t.csv").read_text() == whole
    assert sorted(path.name for path in Path().iterdir()) == ["t.csv", "torn.csv"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["merge", "zoned.csv", "local.csv", "-o", "x"], "have a time zone, and those of local.csv have no time zone"),
        (["merge", "zoned.csv", "relative.csv", "-o", "x"], "relative.csv: its times have no date"),
        (["merge", "zoned.csv", "--align", "end", "-o", "x"], "unknown alignment 'end'; known: after, recorded, start"),
        (["sample", "zoned.csv", "-o", "x"], "say how much to draw"),
        (["sample", "zoned.csv", "-n", 2, "--share", "1%", "-o", "x"], "say how much to draw"),
        (["sample", "zoned.csv", "-n", 2, "-o", "x"], "2 of 1 requests cannot be chosen"),
        (["sample", "zoned.csv", "--share", "200%", "-o", "x"], "the share 2 is out of range"),
        (["sample", "zoned.csv", "--share", "0%", "-o", "x"], "the share 0 is out of range"),
        (["anonymise", "m.prom", "-o", "x"], "m.prom: holds length histograms, not requests"),
        (["anonymise", "http://x/metrics", "-o", "x"], "is a URL, not a file of requests"),
        (["anonymise", "zoned.csv", "-o", "absent/x"], "cannot write the recording to absent/x"),
    ],
)
def test_what_cannot_be_used_is_one_clear_line(llmc: Llmc, arguments: list[object], message: str) -> None:
    Path("zoned.csv").write_text(HEAD + "2026-11-23T12:00:00Z,1,1\n")
    Path("local.csv").write_text(HEAD + "2026-11-23T12:00:00,1,1\n")
    Path("relative.csv").write_text(HEAD + "7,1,1\n")
    Path("m.prom").write_text(scrape([3, 2, 1], [4, 1, 0]))
    assert message in llmc("traffic", *arguments).failed(2)
    assert not Path("x").exists()


@pytest.mark.parametrize("verb", ["show", "merge", "sample", "anonymise"])
def test_every_verb_has_an_example_in_its_help(llmc: Llmc, verb: str) -> None:
    assert f"Example:\n    llmc traffic {verb} " in llmc("traffic", verb, "--help").out
