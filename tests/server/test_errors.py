"""Whatever goes wrong is answered as {"error": …}, with the right status, and tells nothing of the server's inside."""

from __future__ import annotations

import asyncio
import logging

import pytest

from llmc.errors import EngineDeadError, InputError, OverloadedError
from llmc.server.state import Progress, ServerConfig
from tests.server.stub_engine import events, refusal

POSTS = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]
SECRET = "/srv/secret/model.bin"


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"null", b"[]", b'"x"', b"5", b"true", b'{"prompt": NaN}',
        b"[" * 50_000, b'{"messages":' * 3000, b"\xff\xfe", rb'{"prompt": "\ud800"}', b'{"temperature": 1e400}',
        b'{"n": ' + b"9" * 5000 + b"}", b"\x00", b'{"prompt": "a"} x', b'{"prompt": "x", "tokens": [], "messages": 1}x',
    ],
)  # fmt: skip
def test_a_body_that_is_no_json_object_is_a_400(served, path, body):
    assert refusal(served.raw(path, body))["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "multipart/form-data"])
def test_a_body_that_is_not_declared_as_json_is_a_415(served, path, kind):
    refusal(served.ask("POST", path, content=b'{"prompt": "x"}', headers={"Content-Type": kind}), 415)


def test_parameters_of_the_content_type_do_not_matter(served):
    headers = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert served.ask("POST", "/tokenize", content=b'{"prompt": "x"}', headers=headers).status_code == 200


def body_of(size):
    frame = b'{"prompt": ""}'
    return frame[:-2] + b"x" * (size - len(frame)) + frame[-2:]


async def in_parts(data):
    for start in range(0, len(data), 100):
        yield data[start : start + 100]


@pytest.mark.parametrize("size", [1001, 5000, 50_000])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit_is_a_413_however_it_comes(make_api, size, chunked):
    api = make_api(max_body_bytes=1000)
    content = in_parts(body_of(size)) if chunked else body_of(size)
    answer = api.ask("POST", "/tokenize", content=content, headers={"Content-Type": "application/json"})
    assert "1000 bytes" in refusal(answer, 413)["message"]
    assert answer.headers["connection"] == "close"


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_the_limit_is_taken(make_api, chunked):
    api = make_api(max_body_bytes=1000)
    content = in_parts(body_of(1000)) if chunked else body_of(1000)
    answer = api.ask("POST", "/tokenize", content=content, headers={"Content-Type": "application/json"})
    assert answer.json()["count"] == 1000 - 14


def test_an_endless_body_is_not_read_to_its_end(make_api):
    api, read = make_api(max_body_bytes=1000), 0

    async def endless():
        nonlocal read
        while True:
            read += 100
            yield b" " * 100

    refusal(api.ask("POST", "/tokenize", content=endless(), headers={"Content-Type": "application/json"}), 413)
    assert read < 10_000


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("POST", "/v2", 404, "unknown_url"),
        ("GET", "/v1/completions/", 404, "unknown_url"), ("GET", "/docs", 404, "unknown_url"),
        ("GET", "/v1/completions", 405, "method_not_allowed"), ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("PUT", "/tokenize", 405, "method_not_allowed"),
    ],
)  # fmt: skip
def test_unknown_routes_and_methods(served, method, path, status, code):
    answer = served.ask(method, path)
    assert refusal(answer, status)["code"] == code
    assert ("allow" in answer.headers) == (status == 405)


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "TRACE"])
def test_methods_that_no_route_has_are_reported_the_ones_it_has(served, method):
    answer = served.ask(method, "/v1/models")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET")
    assert served.ask("HEAD", "/health").text == ""


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_usual_limit_is_a_413_behind_whatever_takes_it(served, chunked):
    content = iter([body_of(ServerConfig.max_body_bytes + 1)]) if chunked else body_of(ServerConfig.max_body_bytes + 1)
    answer = served.ask("POST", "/tokenize", content=content, headers={"Content-Type": "application/json"})
    assert refusal(answer, 413)["code"] == "body_too_large"


HARMLESS = {
    "x-request-timeout-seconds": [b"0.000001", b"\xe9"], "x-request-disconnect-disabled": [b"?1", b"\xe9"],
    "x-request-id": [b"mine", b"\xe9"], "serve-multiplexed-model-id": [b"x", b"\xe9"], "x-session-id": [b"x", b"\xe9"],
    "traceparent": [b"\xe9"], "x-forwarded-for": [b"\xe9"],
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in HARMLESS.items() for value in values])
def test_headers_that_mean_something_elsewhere_change_nothing(own, name, value):
    body = {"prompt": "abcd", "max_tokens": 8, "ignore_eos": True}
    answer = own.ask("POST", "/v1/completions", json=body, headers={name: value})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 8
    assert sorted(answer.headers) == ["content-length", "content-type", "date"]


def test_a_stream_is_whole_and_says_how_it_is_to_be_passed_on(own):
    answer = own.complete(stream=True, ignore_eos=True)
    assert events(answer)[-1] == "[DONE]"
    wanted = ["cache-control", "content-type", "date", "transfer-encoding", "x-accel-buffering"]
    assert sorted(answer.headers) == wanted


def ways_of(api):
    yield api.complete()
    yield api.complete(stream=True)
    yield api.chat()
    yield api.chat(stream=True)


def test_an_overloaded_engine_is_a_503_that_says_when_to_come_back(api):
    api.engine.refusals = [OverloadedError("the queue is full", 2.5)] * 4
    for answer in ways_of(api):
        error = refusal(answer, 503)
        assert (error["message"], error["type"], error["code"]) == ("the queue is full", "server_error", "overloaded")
        assert answer.headers["retry-after"] == "3"


def test_what_the_engine_refuses_is_a_400(api):
    api.engine.refusals = [InputError("logit_bias: token id 999 is not in the vocabulary")] * 4
    for answer in ways_of(api):
        assert refusal(answer)["param"] == "logit_bias"


def test_a_dead_engine_is_a_503(api):
    api.engine.refusals = [EngineDeadError("the engine stopped")] * 4
    for answer in ways_of(api):
        assert refusal(answer, 503)["code"] == "engine_dead"
    api.engine.error = RuntimeError(SECRET)
    for answer in ways_of(api):
        assert SECRET not in refusal(answer, 503)["message"]
    assert not api.engine.requests


def test_while_loading_everything_that_needs_the_model_is_a_503(make_api):
    api = make_api(phase="loading")
    api.state.progress = Progress("warming up", 3, 72, 12.3)
    posts = [api.post(path, {"prompt": "x", "tokens": []}) for path in ("/tokenize", "/detokenize")]
    for answer in [*ways_of(api), *posts, api.get("/v1/models"), api.get("/v1/models/toy")]:
        error = refusal(answer, 503)
        assert error["code"] == "loading"
        assert "3 of 72" in error["message"]
        assert answer.headers["retry-after"] == "13"
    assert api.get("/version").status_code == 200


def test_a_model_that_could_not_be_loaded_is_a_503_without_details(make_api):
    api = make_api(phase="loading")
    api.state.load_error = InputError(SECRET)
    for answer in ways_of(api):
        assert SECRET not in refusal(answer, 503)["message"]


def test_while_draining_no_new_request_is_taken(make_api):
    api = make_api(phase="draining")
    for answer in ways_of(api):
        assert refusal(answer, 503)["code"] == "draining"
        assert int(answer.headers["retry-after"]) > 0
        assert answer.headers["connection"] == "close"
    assert api.get("/v1/models").status_code == 200


@pytest.mark.parametrize(
    ("fault", "code"), [(EngineDeadError("it stopped"), "engine_dead"), (OSError(SECRET), "internal")]
)
def test_a_fault_before_the_end_is_an_error(api, fault, code, caplog):
    caplog.set_level(logging.CRITICAL, "llmc")
    api.engine.fault = fault
    for path in (api.complete, api.chat):
        error = refusal(path(), 503 if code == "engine_dead" else 500)
        assert error["code"] == code
        assert SECRET not in error["message"]


@pytest.mark.parametrize(
    ("fault", "code"), [(EngineDeadError("it stopped"), "engine_dead"), (OSError(SECRET), "internal")]
)
def test_a_fault_in_a_stream_is_its_last_event(api, fault, code, caplog):
    caplog.set_level(logging.CRITICAL, "llmc")
    api.engine.fault = fault
    for path in (api.complete, api.chat):
        answer = path(stream=True)
        assert answer.status_code == 200
        *chunks, last = events(answer)
        assert "".join(str(c["choices"]) for c in chunks).count("Hel") == 1
        assert list(last) == ["error"]
        assert (last["error"]["code"], last["error"]["type"]) == (code, "server_error")
        assert SECRET not in answer.text
    assert api.engine.cancelled


def test_an_answer_that_is_cut_off_is_an_error_and_no_answer(api):
    api.engine.finish = "abort"
    for path in (api.complete, api.chat):
        assert refusal(path(), 503)["type"] == "server_error"
        assert list(events(path(stream=True))[-1]) == ["error"]


def test_a_choice_that_failed_says_so_beside_others(api):
    api.engine.finish = "error"
    for path in (api.complete, api.chat):
        answer = path(n=2)
        assert answer.status_code == 200
        assert [choice["finish_reason"] for choice in answer.json()["choices"]] == ["error", "error"]
        *chunks, done = events(path(stream=True))
        assert [c["finish_reason"] for e in chunks for c in e["choices"] if c["finish_reason"]] == ["error"]
        assert done == "[DONE]"


def test_what_nobody_foresaw_is_a_500_and_is_logged(api, caplog):
    api.engine.refusals = [ValueError(SECRET)] * 4
    for answer in ways_of(api):
        assert SECRET not in refusal(answer, 500)["message"]
    assert caplog.text.count(f"ValueError: {SECRET}\n") >= 4


def test_a_refused_prompt_takes_back_those_before_it(api):
    api.engine.refusals = [OverloadedError("full"), None, None]
    refusal(api.complete(prompt=["a", "b", "c"]), 503)
    assert api.engine.cancelled == [r.request_id for r in api.engine.requests]
    assert len(api.engine.requests) == 2


def test_answers_are_counted_by_route_and_status(make_api):
    api, counted = make_api(api_keys=("k",)), []
    api.state.metrics.http = lambda route, status: counted.append((route, status))
    key = {"Authorization": "Bearer k"}
    api.get("/v1/models/toy", **key)
    api.get("/v1/models/x", **key)
    api.get("/nothing", **key)
    api.get("/v1/models")
    api.get("/health")
    route = "/v1/models/{name:path}"
    assert counted == [(route, 200), (route, 404), ("none", 404), ("none", 401), ("/health", 200)]


class TestLeaving:
    """A client that leaves; through real sockets: test_disconnect.py."""

    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("prompts", [1, 3])
    def test_cancels_what_was_requested(self, api, path, stream, prompts):
        api.engine.endless = True
        prompt = "x" if prompts == 1 or "chat" in path else ["x"] * prompts
        body = {"messages": "x"} if "chat" in path else {"prompt": prompt}
        sent = asyncio.run(leave_midway(api, path, {**body, "stream": stream}))
        assert api.engine.requests
        assert sorted(api.engine.cancelled) == sorted(r.request_id for r in api.engine.requests)
        started = [m for m in sent if m["type"] == "http.response.start"]
        assert [m["status"] for m in started] == [200 if stream else 499]


async def leave_midway(api, path, body):
    """Ask, wait until the engine has said all it will, then leave; what was sent."""
    import json

    api.engine.waiting = asyncio.Event()
    data, sent = [json.dumps(body).encode()], []

    async def receive():
        if data:
            return {"type": "http.request", "body": data.pop(), "more_body": False}
        await api.engine.waiting.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2), "headers": [(b"content-type", b"application/json")],
    }  # fmt: skip
    before = asyncio.all_tasks()
    async with asyncio.timeout(5):
        await api.app(scope, receive, send)
    assert asyncio.all_tasks() == before
    return sent
