"""Whole runs against a scripted server: pace, concurrency, calibration, and what cannot be run."""

from __future__ import annotations

import math
import resource
from pathlib import Path
from typing import Any

import pytest

from llmc.bench.loadtest.plots import draw
from llmc.bench.loadtest.report import Report
from llmc.bench.loadtest.run import LoadTest, run
from llmc.bench.loadtest.workload import Workload
from llmc.errors import InputError, LlmcError
from tests.bench.loadtest.scripted import MODEL, Answer, ScriptedServer, error, serving, stream


def load(server: ScriptedServer, workload: Workload | None = None, **test: Any) -> Report:
    return run(LoadTest(server.url, workload or Workload(requests=4, output_len=(2, 2)), **{"warmup": 0, **test}))


def paced(requests: int, rate: float) -> Workload:
    return Workload(requests=requests, rate=rate, arrivals="uniform", prompt_len=(8, 8), output_len=(2, 2))


def test_open_loop_waits_for_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(stream(first=0.3), monkeypatch) as server:
        report = load(server, paced(6, 50.0))
    assert report.ok == 6
    assert server.peak == report.peak_concurrency == 6
    assert [o.due_s for o in report.outcomes] == pytest.approx([0.02 * i for i in range(6)])
    assert [o.sent_s for o in report.outcomes] == pytest.approx([o.due_s for o in report.outcomes])
    assert report.duration_s == pytest.approx(0.4)


def test_a_stall_counts_for_every_request_it_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_at_a_time(place: int, _: object) -> Answer:
        # a server with one slot, 100 ms each, whose queue is in the connection: request i starts at 0.1 · i
        return stream(first=0.1 * (place + 1) - 0.02 * place)

    with serving(one_at_a_time, monkeypatch) as server:
        report = load(server, paced(5, 50.0))
    waits = [o.ttft_s for o in report.outcomes]
    assert waits == pytest.approx([0.1 * (i + 1) - 0.02 * i for i in range(5)])


def test_closed_loop_keeps_so_many_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(stream(first=0.02, gap=0.02, count=3), monkeypatch) as server:
        workload = Workload(requests=12, concurrency=3, output_len=(3, 3))
        report = load(server, workload)
    assert report.ok == 12
    assert server.peak == report.peak_concurrency == 3
    assert report.duration_s == pytest.approx(4 * 0.06)
    assert report.latency["ttft"] is not None and report.latency["ttft"].p50 == pytest.approx(0.02)


def test_the_figures_of_a_scripted_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(stream(first=0.1, gap=0.02, count=11, prompt=64), monkeypatch) as server:
        workload = Workload(requests=8, rate=math.inf, prompt_len=(64, 64), output_len=(11, 11))
        report = load(server, workload, objectives={"ttft": 0.2, "e2e": 0.05})
    ttft, itl, tpot, e2e = (report.latency[name] for name in ("ttft", "itl", "tpot", "e2e"))
    assert ttft and itl and tpot and e2e
    assert ttft.p50 == pytest.approx(0.1)
    assert (itl.count, itl.mean) == (80, pytest.approx(0.02))
    assert tpot.p99 == pytest.approx(0.02)
    assert e2e.p50 == pytest.approx(0.3)
    assert (report.prompt_tokens, report.output_tokens) == (8 * 64, 88)
    assert report.output_rate == pytest.approx(88 / report.duration_s)
    assert report.goodput is not None and report.goodput.requests == 0
    assert report.counted and report.client_cpu < 1


def test_refusals_are_counted_apart_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def every_second(place: int, _: object) -> Answer:
        return error(503, "the queue is full", **{"Retry-After": "1"}) if place % 2 else stream(first=0.2)

    with serving(every_second, monkeypatch) as server:
        report = load(server, paced(10, 100.0))
    assert (report.ok, report.refused, report.failed) == (5, 5, 0)
    assert report.refusal is not None and report.refusal.max == 0
    assert report.retry_after_s == (1.0, 1.0)
    assert report.output_tokens == 10


def test_prompts_are_as_long_as_the_server_counts() -> None:
    with serving(stream()) as server:
        server.words = lambda prompt: 7 + 2 * len(prompt.split())
        load(server, Workload(requests=2, prompt_len=(47, 47), output_len=(2, 2)))
    assert [len(body["prompt"].split()) for body in server.requests] == [20, 20]
    assert server.calibrations == 2


def test_calibration_shortens_what_is_too_long_for_the_model() -> None:
    class Small(ScriptedServer):
        def _choose(self, path: str, headers: dict[str, str], body: dict[str, Any]) -> Answer:
            if len(body.get("prompt", "").split()) > 9:
                return error(400, "the prompt is too long")
            return super()._choose(path, headers, body)

    with Small(lambda *_: stream()).running() as server:
        assert load(server, Workload(requests=1, prompt_len=(9, 9), output_len=(2, 2))).ok == 1


def test_a_server_without_usage_is_believed_one_token_a_word() -> None:
    with serving(stream(prompt=None)) as server:
        server.words = None
        report = load(server)
    assert not report.counted
    assert {len(body["prompt"].split()) for body in server.requests} == {128}


@pytest.mark.parametrize("path", ["/tokenize", "/extras/tokenize"])
def test_prompts_of_token_ids(path: str) -> None:
    with serving(stream()) as server:
        server.others[path] = Answer([(0.0, b'{"tokens": [4, 5, 9, 5]}')], 200, {})
        load(server, prompt_ids=True)
    prompts = [body["prompt"] for body in server.requests]
    assert all(len(p) == 128 and set(p) <= {4, 5, 9} for p in prompts)


def test_token_ids_need_a_tokenizer() -> None:
    with serving(stream()) as server, pytest.raises(InputError, match="no /tokenize"):
        load(server, prompt_ids=True)


def test_warmup_is_not_counted() -> None:
    with serving(stream()) as server:
        report = load(server, warmup=3)
    assert (report.requests, len(server.requests)) == (4, 7)
    assert len({body["prompt"] for body in server.requests}) == 7


def test_the_model_is_the_first_listed_or_the_named_one() -> None:
    with serving(stream()) as server:
        assert load(server).model == MODEL
        assert load(server, model="mine").model == "mine"
    assert {body["model"] for body in server.requests} == {MODEL, "mine"}


def test_chat() -> None:
    with serving(stream(chat=True)) as server:
        assert load(server, endpoint="chat").ok == 4
    assert all(body["messages"][0]["role"] == "user" for body in server.requests)


def test_progress_counts_failures() -> None:
    seen: list[tuple[str, int, int]] = []
    with serving(lambda place, _: error(500, "no") if place == 1 else stream()) as server:
        workload = Workload(requests=3, concurrency=1, output_len=(2, 2))
        run(LoadTest(server.url, workload, warmup=0), lambda *what: seen.append(what))
    assert seen == [("all well", 1, 3), ("1 failed", 2, 3), ("1 failed", 3, 3)]


def test_a_server_that_is_not_there() -> None:
    with serving(stream()) as server:
        pass
    with pytest.raises(LlmcError, match=r"127\.0\.0\.1:\d+ cannot be reached: Connection refused; is the server"):
        load(server)


@pytest.mark.parametrize(
    ("models", "key", "expected"),
    [
        (error(401, "no key"), None, r"wants an API key; give --api-key \(401\): no key"),
        (error(401, "wrong"), "k", r"takes another API key than the one given \(401\)"),
        (error(503, "loading, 3 of 9"), None, r"takes no requests now \(503\): loading, 3 of 9; try again"),
        (error(404, "what?"), None, "lists no model"),
    ],
)
def test_what_the_list_of_models_says(models: Answer, key: str | None, expected: str) -> None:
    with serving(stream()) as server:
        server.others["/v1/models"] = models
        with pytest.raises(LlmcError, match=expected):
            load(server, api_key=key)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (error(404, "no such model"), r"has no model 'scripted', or no completions endpoint \(404\): no such model"),
        (error(422, "unknown field"), r"refuses the kind of request .* \(422\): unknown field"),
        (Answer([(0.0, b"{}")], 200, {"Content-Type": "application/json"}), "not text/event-stream"),
        (error(500, "broken"), "does not answer as a streaming server: http 500: broken"),
    ],
)
def test_what_every_request_would_meet_is_said_at_once(answer: Answer, expected: str) -> None:
    with serving(stream()) as server:
        server.others["/v1/completions"] = answer
        with pytest.raises(LlmcError, match=expected):
            load(server)
    assert not server.requests


def test_a_run_of_failures_only_is_an_error() -> None:
    with (
        serving(error(500, "broken")) as server,
        pytest.raises(LlmcError, match=r"none of 4 requests .*; 4: http 500: broken"),
    ):
        load(server)


def test_many_connections_at_once_and_the_limit_is_put_back() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        with serving(stream(first=0.3)) as server:
            few = len([*Path("/proc/self/fd").iterdir()]) + 280  # each connection has two ends here
            resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
            report = load(server, Workload(requests=150, rate=math.inf, prompt_len=(4, 4), output_len=(2, 2)))
            assert report.ok == 150
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (few, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("name", ["run.png", "run.html"])
def test_a_run_can_be_drawn(name: str, tmp_path: Path) -> None:
    with serving(lambda place, _: error(500, "<no>") if place == 1 else stream(gap=0.01, count=3)) as server:
        report = load(server)
    draw(tmp_path / name, report)
    content = (tmp_path / name).read_bytes()
    if name.endswith("png"):
        assert content.startswith(b"\x89PNG")
    else:
        assert content.count(b"<svg") == 2 and b"&lt;no&gt;" in content and b"<no>" not in content
        assert b"http://" not in content.replace(b"http://www.w3.org", b"").replace(server.url.encode(), b"")
