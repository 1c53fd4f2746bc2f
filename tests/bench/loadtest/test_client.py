"""One request: what its answer's pieces, times and ends are taken for."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.bench.loadtest import client, run
from llmc.bench.loadtest.client import Caller, EventParser
from llmc.bench.loadtest.http import Site
from llmc.bench.loadtest.outcome import Failure, Outcome
from llmc.errors import InputError
from tests.bench.loadtest.scripted import DONE, Answer, chunk, error, serving, stream, usage

LINE = st.binary(max_size=6).filter(lambda data: not set(data) & set(b"\r\n"))


def call(answer: Answer, virtual: pytest.MonkeyPatch | None = None, **caller: Any) -> Outcome:
    """The outcome of one request, of 4 tokens, that is answered so."""
    with serving(answer, virtual) as server:
        return call_at(server.url, **caller)


def call_at(url: str, **caller: Any) -> Outcome:
    async def send() -> Outcome:
        outcome = Outcome(0, 0.0, 8, 4)
        return await Caller(Site.parse(url), "m", **caller).call(outcome, "a prompt", client.perf_counter())

    with asyncio.Runner(loop_factory=run._loop_factory()) as runner:
        return runner.run(send())


def failure(answer: Answer, **caller: Any) -> Failure:
    found = call(answer, **caller).failure
    assert found is not None
    return found


def test_times_are_those_of_the_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    found = call(stream(first=0.08, gap=0.03, count=4), monkeypatch)
    assert found.ok
    assert (found.sent_s, found.connected_s) == (0, 0)
    assert found.ttft_s == pytest.approx(0.08)
    assert found.gaps_s == pytest.approx([0.03] * 3)
    assert found.tpot_s == pytest.approx(0.03)
    assert found.e2e_s == pytest.approx(0.17)
    assert (found.prompt_tokens, found.output_tokens, found.finish_reason) == (8, 4, "length")


def test_the_first_token_is_the_first_text(monkeypatch: pytest.MonkeyPatch) -> None:
    role = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
    ping = b": ping\r\n\r\n"
    pieces = [(0.0, role), (0.02, ping), (0.1, chunk("a", chat=True)), (0.1, chunk("", "stop", chat=True)), (0.1, DONE)]
    found = call(Answer(pieces), monkeypatch, endpoint="chat")
    assert found.ok and len(found.text_s) == 1
    assert found.ttft_s == pytest.approx(0.1)


@pytest.mark.parametrize("field", ["reasoning_content", "tool_calls"])
def test_reasoning_and_tool_calls_are_text_too(field: str) -> None:
    event = {"choices": [{"index": 0, "delta": {field: "x"}, "finish_reason": "stop"}]}
    assert len(call(Answer([(0.0, b"data: " + json.dumps(event).encode() + b"\n\n"), (0.0, DONE)])).text_s) == 1


def test_usage_is_taken_where_it_comes() -> None:
    found = call(Answer([(0.0, chunk()), (0.0, chunk("x", "stop")), (0.0, usage(7, 5, cached=3)), (0.0, DONE)]))
    assert (found.prompt_tokens, found.output_tokens, found.cached_tokens, found.tokens) == (7, 5, 3, 5)
    assert call(stream(count=3, prompt=None)).tokens == 3
    odd = b'data: {"usage": {"prompt_tokens": "7", "completion_tokens": null}}\n\n'
    assert call(Answer([(0.0, chunk("x", "stop")), (0.0, odd), (0.0, DONE)])).tokens == 1


@pytest.mark.parametrize("answer", [stream(done=False), stream(finish=None)], ids=["reason only", "[DONE] only"])
def test_either_end_is_an_end(answer: Answer) -> None:
    assert call(answer).ok


def test_an_answer_without_a_frame_ends_with_the_connection() -> None:
    found = call(Answer([(0.0, chunk()), (0.01, chunk("x", "stop")), (0.01, DONE)], chunked=False, whole=False))
    assert found.ok and len(found.text_s) == 2


def test_interim_answers_are_passed_over() -> None:
    body = chunk("x", "stop") + DONE
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % len(body)
    assert call(Answer(raw=b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + head + body)).ok


def test_refusals_say_when_to_come_again() -> None:
    assert failure(error(503, "queue full", **{"Retry-After": "2"})) == Failure("http 503", "queue full", 2.0)
    assert failure(error(503, "full", **{"Retry-After": "Fri, 31 Dec 1999 23:59:59 GMT"})).retry_after_s is None
    assert failure(error(503, "x")).refused and failure(error(429, "x")).refused


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (error(400, "too long\nby 3"), "http 400", "too long by 3"),
        (Answer([(0.0, b'{"detail": "nope"}')], 422), "http 422", "nope"),
        (Answer([(0.0, b"<h1>Bad gateway</h1>")], 502), "http 502", "<h1>Bad gateway</h1>"),
        (Answer([(0.0, b"{}")], 200, {"Content-Type": "application/json"}), "not a stream", "application/json"),
        (Answer([(0.0, b"x")], 200, {}), "not a stream", "no content type"),
        (Answer(raw=b"SSH-2.0-OpenSSH_9.6\r\n"), "not a stream", "not HTTP/1.1"),
        (Answer(raw=b""), "no connection", "closed without an answer"),
        (stream(done=False, finish=None), "truncated", "without a finish reason"),
        (Answer([(0.0, chunk()), (0.0, chunk())], whole=False), "truncated", "after 2 pieces"),
        (Answer([(0.0, chunk("x", "stop"))], whole=False), "truncated", "after 1 pieces"),
        (Answer([(0.0, chunk()), (0.0, b'data: {"error": {"message": "gone"}}\n\n')]), "error event", "gone"),
        (Answer([(0.0, b'data: {"error": {"message": "gone"}}\n\n')], whole=False), "error event", "gone"),
        (Answer([(0.0, chunk()), (0.0, b"data: oops\n\n"), (0.0, DONE)]), "error event", "oops"),
        (Answer([(0.0, b'data: {"choices": [7]}\n\n'), (0.0, DONE)]), "error event", "not a chunk of OpenAI's"),
        (Answer([(0.0, b'data: {"choices": {"a": 1}}\n\n'), (0.0, DONE)]), "error event", "not a chunk"),
        (Answer([(0.0, b'data: {"choices": [{"delta": 3}]}\n\n'), (0.0, DONE)]), "error event", "not a chunk"),
        (Answer([(0.0, b'data: {"usage": 5}\n\n'), (0.0, DONE)]), "error event", "not a chunk"),
        (stream(finish="abort"), "finished by abort", "'abort'"),
    ],
)
def test_failures_are_told_apart(answer: Answer, kind: str, message: str) -> None:
    found = failure(answer)
    assert found.kind == kind and message in found.message
    assert not found.refused


def test_nobody_there() -> None:
    with serving(stream()) as server:
        url = server.url
    found = call_at(url).failure
    assert found == Failure("no connection", "Connection refused")


def test_a_slow_answer_times_out_from_its_sending(monkeypatch: pytest.MonkeyPatch) -> None:
    found = call(stream(first=0.0, gap=0.1, count=20), monkeypatch, timeout_s=0.25)
    assert found.failure == Failure("timeout", "not whole after 0.25 s")
    assert found.e2e_s == pytest.approx(0.25)
    assert len(found.text_s) == 3


def test_what_is_sent() -> None:
    with serving(stream()) as server:
        call_at(server.url, api_key="secret", temperature=0.5, extra={"top_k": 3, "temperature": 1})
        call_at(server.url + "/v1/", endpoint="chat", ignore_eos=False)
    first, second = server.requests
    assert first == {
        "model": "m", "prompt": "a prompt", "max_tokens": 4, "temperature": 1, "stream": True, "ignore_eos": True,
        "stream_options": {"include_usage": True}, "top_k": 3,
    }  # fmt: skip
    assert second["messages"] == [{"role": "user", "content": "a prompt"}]
    assert "prompt" not in second and "ignore_eos" not in second
    assert server.headers[0]["authorization"] == "Bearer secret"
    assert "authorization" not in server.headers[1]


@pytest.mark.parametrize(
    ("url", "site"),
    [
        ("http://localhost:8000", Site("localhost", 8000, False, "")),
        ("http://localhost:8000/v1/", Site("localhost", 8000, False, "")),
        ("https://api.example.org/v1/chat/completions", Site("api.example.org", 443, True, "")),
        ("http://[::1]:9/proxy/v1/completions", Site("::1", 9, False, "/proxy")),
    ],
)
def test_urls(url: str, site: Site) -> None:
    assert Site.parse(url) == site


@pytest.mark.parametrize(
    "wrong",
    ["localhost:8000", "ftp://x", "http://", "http://x:port", "http://x:99999", "http://u:p@x", "http://x/?a=b"],
)
def test_urls_that_are_none(wrong: str) -> None:
    with pytest.raises(InputError):
        Site.parse(wrong)


@given(
    events=st.lists(st.lists(LINE, min_size=1, max_size=3)),
    newline=st.sampled_from([b"\n", b"\r\n"]),
    cuts=st.lists(st.integers(0, 200)),
)
def test_events_are_found_wherever_the_pieces_are_cut(
    events: list[list[bytes]], newline: bytes, cuts: list[int]
) -> None:
    lines = b"".join(b"".join(b"data: " + d + newline for d in data) + b": ping" + newline * 2 for data in events)
    parser, found, start = EventParser(), [], 0
    for cut in [*sorted(cuts), len(lines)]:
        found += parser.feed(lines[start:cut])
        start = max(start, cut)
    assert found == [b"\n".join(data) for data in events]
