"""`llmc traffic show`, as typed: logs of all kinds, and a running server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmc.buckets.traffic.reader import Trace
from tests.buckets.traffic.files import SAMPLE
from tests.buckets.traffic.formats.logs import scrape
from tests.buckets.traffic.formats.test_prometheus import answer, serving
from tests.cli.helpers import Llmc
from tests.integrations.test_logs import GAUDI, TABLE


def test_requests_as_a_table(llmc: Llmc) -> None:
    ran = llmc("traffic", "show", SAMPLE)
    assert ran.code == 0 and ran.err == ""
    assert ran.out.startswith("1,500 requests in 0:0")
    assert [line.split()[0] for line in ran.out.splitlines()[2:6]] == ["tokens", "prompt", "output", "together"]
    assert "running at once: p50" in ran.out and "drift: in one part of the time, " in ran.out


def test_requests_as_json(llmc: Llmc) -> None:
    found = llmc("traffic", "show", SAMPLE, "--json").json
    summary = Trace(SAMPLE).summary()
    assert (found["format"], found["kind"], found["requests"]) == ("csv", "requests", 1500)
    assert found["lengths"]["prompt"]["mean"] == pytest.approx(summary.prompt_tokens / 1500, abs=1e-3)
    assert sum(window["requests"] for window in found["windows"]) == 1500


def test_what_was_left_out_is_on_standard_error(llmc: Llmc) -> None:
    Path("t.csv").write_text("prompt_tokens,output_tokens\n5,2\n5,0\n")
    ran = llmc("traffic", "show", "t.csv")
    assert ran.err == "left out: 1 request without a prompt or without output\n"
    assert ran.out.startswith("1 request, which record no times")


def test_histograms_show_intervals(llmc: Llmc) -> None:
    Path("m.prom").write_text(scrape([3, 2, 1], [4, 1, 0]))
    ran = llmc("traffic", "show", "m.prom")
    assert "6 requests, lengths known by interval" in ran.out
    assert "1 to 10" in ran.out and "11 to 100" in ran.out
    assert llmc("traffic", "show", "m.prom", "--json").json["prompt"]["intervals"] == [
        [1, 10, 3],
        [11, 100, 2],
        [101, None, 1],
    ]


def test_steps_show_shapes(llmc: Llmc) -> None:
    Path("server.log").write_text(TABLE)
    ran = llmc("traffic", "show", "server.log")
    assert "32 steps of 2 shapes (tokens), 7.3% padding" in ran.out
    assert ran.err == "2 of 32 steps ran without a graph\n"
    Path("gaudi.log").write_text(GAUDI)
    found = llmc("traffic", "show", "gaudi.log", "--json").json
    assert (found["kind"], found["counted"], found["axes"]) == ("steps", "misses", ["batch", "query", "blocks"])
    assert found["prepared"]["decode"] == [[8, 1, 512]]


def test_requests_histograms_and_steps_are_drawn(llmc: Llmc) -> None:
    Path("m.prom").write_text(scrape([3, 2, 1], [4, 1, 0]))
    Path("server.log").write_text(TABLE)
    for file, name in ((SAMPLE, "a.png"), ("m.prom", "b.html"), ("server.log", "c.html"), ("server.log", "d.html")):
        assert f"wrote {name}\n" in llmc("traffic", "show", file, "--plot", name).err
    assert Path("a.png").read_bytes().startswith(b"\x89PNG")
    assert "6 requests, lengths known by interval" in Path("b.html").read_text()
    assert Path("c.html").read_bytes() == Path("d.html").read_bytes()


def test_a_running_server_is_sampled_and_kept_for_planning(llmc: Llmc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmc.cli.traffic.MIN", 0.01)
    with serving(answer(scrape([3, 2, 1], [4, 1, 0])), answer(scrape([9, 2, 1], [9, 2, 0]))) as url:
        ran = llmc("traffic", "show", url, "--for", "0.02s", "--every", "0.02s", "-o", "sampled.prom", "--json")
    found = json.loads(ran.out)
    assert found["requests"] == 6 and found["duration_s"] >= 0.02
    assert "requests in" in ran.err and "wrote sampled.prom" in ran.err
    assert llmc("plan", "--max-model-len", 64, "--traffic", "sampled.prom", "--max-graphs", 4).code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.log"], "cannot read the trace absent.log"),
        ([SAMPLE, "--for", "5s"], "--for is for sampling a URL"),
        ([SAMPLE, "--plot", "x.pdf"], "give a file name that ends in .png or .html"),
        ([SAMPLE, "--traffic-format", "vllm"], "unknown traffic format 'vllm'; known: csv"),
        (["http://127.0.0.1:1/metrics"], "is the server running?"),
        (["http://127.0.0.1:1/metrics", "--fields", "prompt=a,output=b"], "leave out --traffic-format and --fields"),
    ],
)
def test_what_cannot_be_used_is_one_clear_line(llmc: Llmc, arguments: list[object], message: str) -> None:
    assert message in llmc("traffic", "show", *arguments).failed(2)
