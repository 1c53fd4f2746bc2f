"""`llmc bench serve`: flags, the report in each of its forms, and errors in one line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.bench.loadtest.scripted import Answer, ScriptedServer, error, serving, stream
from tests.cli.helpers import Llmc

SMALL = ("-n", 6, "--output-len", 3, "--warmup", 0)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    """Answers each request with 3 tokens, 20 ms apart."""
    with serving(stream(gap=0.02, count=3, prompt=128)) as running:
        yield running


def test_the_report_for_a_person(llmc: Llmc, server: ScriptedServer) -> None:
    ran = llmc("bench", "serve", server.url, *SMALL, "--concurrency", 2, "--slo", "ttft=1s,itl=1ms")
    assert ran.code == 0
    assert ran.out.startswith(f"scripted at {server.url}, completions: closed loop, 2 at a time\n")
    assert "6: 6 ok, 0 refused, 0 failed" in ran.out
    assert "768 in prompts, 18 generated" in ran.out
    assert "0 of 6 (0.0%) kept ttft ≤ 1000 ms, itl ≤ 1 ms" in ran.out
    assert [line.split()[0] for line in ran.out.splitlines() if line[:4] in ("TTFT", "ITL ", "TPOT", "E2E ")] == [
        "TTFT", "ITL", "TPOT", "E2E",
    ]  # fmt: skip
    assert ran.err.splitlines() == [f"[{i}/6] all well" for i in range(1, 7)]


def test_the_report_for_a_script(llmc: Llmc, server: ScriptedServer) -> None:
    ran = llmc("bench", "serve", server.url, *SMALL, "--rate", 100, "--arrivals", "uniform", "--json")
    found = ran.json
    assert ran.err == ""
    assert (found["ok"], found["peak_concurrency"]) == (6, found["peak_concurrency"])
    assert found["sent"] == "open loop, 100 requests/s (uniform)"
    assert found["latency"]["itl"]["p50"] == pytest.approx(0.02, abs=0.01)
    assert "each" not in found


def test_long_runs_report_each_tenth(llmc: Llmc, server: ScriptedServer) -> None:
    ran = llmc("bench", "serve", server.url, "-n", 40, "--output-len", 2, "--rate", "inf", "--warmup", 0)
    assert [line.split("]")[0] for line in ran.err.splitlines()] == [f"[{4 * i}/40" for i in range(1, 11)]
    assert llmc("bench", "serve", server.url, *SMALL, "-q").err == ""


def test_the_report_goes_to_files(llmc: Llmc, server: ScriptedServer, here: Path) -> None:
    ran = llmc("bench", "serve", server.url, *SMALL, "-o", "run.json", "--plot", "run.html", "--json")
    assert ran.code == 0
    document = json.loads((here / "run.json").read_text())
    assert len(document["each"]) == 6
    assert {k: v for k, v in document.items() if k != "each"} == ran.json
    assert (here / "run.html").read_text().count("<svg") == 2
    assert ran.err.endswith("wrote run.json\nwrote run.html\n")


def test_a_trace(llmc: Llmc, server: ScriptedServer, here: Path) -> None:
    (here / "t.csv").write_text("time,prompt_tokens,output_tokens\n0,80,40\n1,8,80\n2,16,16\n")
    arguments = ("--traffic", "t.csv", "--scale", 0.25, "--max-model-len", 24, "--rate", "trace", "--speedup", 100)
    found = llmc("bench", "serve", server.url, "-n", 3, "--warmup", 0, *arguments, "--json").json
    assert found["sent"] == "open loop, at the trace's times, 100× as fast"
    assert found["asked_prompt_tokens"] == 20 + 2 + 4
    assert sorted(body["max_tokens"] for body in server.requests) == [4, 4, 20]


def test_what_is_sent(llmc: Llmc, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("--no-ignore-eos", "--temperature", 0.7, "--extra-body", '{"top_k": 5}', "--model", "other")
    llmc("bench", "serve", server.url, *SMALL, *flags, "--api-key", "k")
    monkeypatch.setenv("LLMC_API_KEY", "from the environment")
    llmc("bench", "serve", server.url, *SMALL)
    body = server.requests[0]
    assert "ignore_eos" not in body
    assert (body["temperature"], body["top_k"], body["model"]) == (0.7, 5, "other")
    assert server.headers[0]["authorization"] == "Bearer k"
    assert server.headers[-1]["authorization"] == "Bearer from the environment"


def test_equal_seeds_send_equal_requests(llmc: Llmc, server: ScriptedServer) -> None:
    for seed in (1, 1, 2):
        llmc("bench", "serve", server.url, *SMALL, "--prompt-len", "3,30", "--concurrency", 1, "--seed", seed)
    prompts = [body["prompt"] for body in server.requests]
    assert prompts[:6] == prompts[6:12] != prompts[12:]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--scale", 0.5), "--scale needs --traffic"),
        (("--max-model-len", 9), "--max-model-len needs --traffic"),
        (("--rate", "trace"), "--rate trace needs --traffic"),
        (("--rate", 4, "--concurrency", 2), "--concurrency excludes --rate"),
        (("--rate", 4, "--speedup", 2), "--speedup needs --rate trace"),
        (("--arrivals", "uniform"), "--arrivals needs --rate with a number"),
        (("--rate", "inf", "--burstiness", 2), "--burstiness needs --rate with a number"),
        (("--rate", 4, "--arrivals", "uniform", "--burstiness", 2), "--burstiness needs --arrivals poisson"),
        (("--rate", 4, "--burstiness", 0), "--burstiness 0 must be above 0"),
        (("--rate", 0), "--rate '0' is not a number of requests per second above 0, or inf"),
        (("--traffic", "t.csv", "--prompt-len", 4), "--prompt-len is the trace's where there is --traffic"),
        (("--prompt-len", "9,3"), "--prompt-len '9,3' is neither a number of tokens nor a range such as 32,128"),
        (("--output-len", "many"), "--output-len 'many' is neither a number of tokens nor a range such as 32,128"),
        (("--shared-prefix", "120%"), "--shared-prefix 120% must be at most 100%"),
        (("--endpoint", "chat", "--prompt-ids"), "--prompt-ids needs --endpoint completions"),
        (("--timeout", 0), "--timeout '0' must be above 0"),
        (("--extra-body", "[1]"), "--extra-body must be a JSON object"),
        (("--plot", "run.gif"), "cannot draw to run.gif: give a file name that ends in .png or .html"),
    ],
)
def test_flags_that_do_not_fit(llmc: Llmc, server: ScriptedServer, flags: tuple[Any, ...], message: str) -> None:
    assert llmc("bench", "serve", server.url, *flags).failed(2) == message
    assert not server.requests and not server.calibrations


def test_a_server_that_is_not_there(llmc: Llmc) -> None:
    with serving(stream()) as gone:
        pass
    message = llmc("bench", "serve", gone.url, "-q").failed(1)
    assert message == f"{gone.url} cannot be reached: Connection refused; is the server running there?"


def test_a_key_that_is_missing(llmc: Llmc, server: ScriptedServer) -> None:
    server.others["/v1/models"] = error(401, "no key")
    assert "wants an API key; give --api-key (401): no key" in llmc("bench", "serve", server.url, "-q").failed(2)


def test_a_run_in_which_nothing_succeeds_fails(llmc: Llmc, server: ScriptedServer) -> None:
    server.script = lambda *_: Answer([(0.0, b"data: {}\n\n")])
    message = llmc("bench", "serve", server.url, *SMALL, "-q").failed(1)
    assert message.startswith(f"none of 6 requests to {server.url} succeeded; 6: truncated: ")


def test_buckets_are_still_measured_without_the_word(llmc: Llmc, bundle: Path) -> None:
    short, long = llmc("bench", "bundle", "--seconds", 0, "--json"), llmc("bench", "buckets", "bundle", "--seconds", 0)
    assert short.json["measurements"] and long.code == 0
    assert llmc("bench", "--seconds", 0, "bundle", "--json").code == 0


def test_the_help_names_both(llmc: Llmc) -> None:
    ran = llmc("bench", "--help")
    assert "buckets" in ran.out and "serve" in ran.out
    assert "Example:\n" in llmc("bench", "serve", "--help").out
