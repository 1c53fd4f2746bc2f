"""A request's schema, expression or grammar harms that request alone: over real sockets, with small limits."""

from __future__ import annotations

import asyncio
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from llmc.runtime.confined.limits import ChildLimits
from llmc.runtime.startup.opening import EngineOptions
from llmc.server.events import Draining
from llmc.testing.toy import BYTES
from tests.runtime.engine.sampling.test_constraints import chained
from tests.server.live import Call, Live
from tests.server.process import Process
from tests.tiers import default_cases, full
from tests.timing import PATIENCE_S, until

LIMITS = ChildLimits(seconds=0.5, memory_bytes=256 << 20, stack_bytes=1 << 20, workers=1)
GOOD = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
SLOW = "".join(f"(x{i}|y{i})?" for i in range(12_000))
HEALTHY_S = 2.0
"""The bound on /health here is generous: the machine that tests may have much else to do."""


@pytest.fixture
def server(bundle: Path) -> Iterator[Live]:
    with Live(bundle, options=EngineOptions(grammar_limits=LIMITS)) as live:
        live.ready().complete(structured_outputs={"choice": ["ab"]}, ignore_eos=False)  # the nursery runs
        yield live


class Health:
    """Asks /health every few milliseconds; `worst` is how long the slowest answer took."""

    def __init__(self, server: Live) -> None:
        self._server, self._over, self.worst, self.requested = server, False, 0.0, 0
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> Health:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._thread.join()

    def _ask(self) -> None:
        while not self._over:
            began = time.monotonic()
            assert self._server.get("/health").status == 200
            self.worst = max(self.worst, time.monotonic() - began)
            self.requested += 1
            time.sleep(0.005)  # without it the asking itself, in the server's process, is what slows all else


def tool(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


HOSTILE = {
    "chained schema": ({"guided_json": chained(2000)}, "nested or chained too deeply for a stack of 1 MiB"),
    "response_format": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": chained(2000)}}}, "deeply",
    ),
    "long expression": ({"guided_regex": SLOW}, "0.5 s of processor time; make it smaller, or raise"),
    "repeated expression": ({"guided_regex": "(a{1000}){1000}"}, "0.5 s of processor time|256 MiB of memory"),
    "rules": (
        {"guided_grammar": "start: r0\n" + "".join(f'r{i}: "a" r{i + 1}\n' for i in range(4000)) + 'r4000: "b"'},
        "too deeply",
    ),
}  # fmt: skip


def test_a_hostile_grammar_is_a_400_and_all_else_goes_on(server: Live):
    """Also what was asked for while it compiled: /health, another stream, another schema."""
    with Health(server) as health:
        for name, (fields, message) in HOSTILE.items():
            call = Call(lambda fields=fields: server.complete(**fields))
            stream = server.complete(stream=True, max_tokens=20)
            assert (stream.status, stream.chunks[-1]["choices"][0]["finish_reason"]) == (200, "length"), name
            assert call.answer.status == 400, name
            error = call.answer.json["error"]
            assert error["type"] == "invalid_request_error", name
            assert re.search(f"cannot be followed: it .*({message})", error["message"]), error
            good = server.complete(guided_json=GOOD, max_tokens=28, ignore_eos=False)
            assert good.status == 200, name
    assert health.requested > len(HOSTILE) and health.worst < HEALTHY_S
    assert server.stats.running == server.stats.waiting == 0


def test_strict_tools_go_the_same_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from llmc.testing import toy
    from tests.server.live import toy_bundle

    monkeypatch.setattr(toy, "TEMPLATE", toy.TEMPLATE + "{% if tools %}<tool_call>{% endif %}")
    with Live(toy_bundle(tmp_path), options=EngineOptions(grammar_limits=LIMITS)) as live:
        body = {"messages": "hi", "max_tokens": 4, "tool_choice": "required", "tools": [tool(chained(2000))]}
        answer = live.ready().ask("POST", "/v1/chat/completions", body)
        assert answer.status == 400 and "too deeply" in answer.text


def nursery(live: Live) -> psutil.Process:
    served = live.server.state.served
    assert served is not None
    pool = served.engine.engine.constraints()._pool
    until(lambda: pool.pid is not None)
    return psutil.Process(pool.pid)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_takes_its_compile_with_it(bundle: Path, stream: bool):
    """The expression would compile for far longer than is waited for here."""
    long = "".join(f"(x{i}|y{i})?" for i in range(16_000))
    generous = replace(LIMITS, seconds=600.0, memory_bytes=4 << 30)
    with Live(bundle, options=EngineOptions(grammar_limits=generous)) as live:
        live.ready()
        served = live.server.state.served
        assert served is not None
        with live.begin(guided_regex=long, stream=stream):
            until(lambda: served.engine.in_flight == 1 and served.engine.stats.waiting == 1)
            family = nursery(live)
            until(lambda: bool(family.children()))
        until(lambda: not family.children())
        until(lambda: served.engine.in_flight == 0)
        assert live.complete(guided_json=GOOD, max_tokens=28, ignore_eos=False).status == 200


def holding(factory: Any, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Compiles begin once the event is set."""
    let = threading.Event()

    async def acompile(structured: Any, built: Any = factory.acompile) -> Any:
        while not let.is_set():
            await asyncio.sleep(0.005)
        return await built(structured)

    monkeypatch.setattr(factory, "acompile", acompile)
    return let


@full
def test_compiles_count_in_the_queue(bundle: Path, monkeypatch: pytest.MonkeyPatch):
    """Four slots, one place to wait in, and five grammars that compile: the sixth request is refused at once."""
    with Live(
        bundle, options=EngineOptions(grammar_limits=replace(LIMITS, seconds=0.1)), max_queued_requests=1
    ) as live:  # fmt: skip
        live.ready().complete(structured_outputs={"choice": ["ab"]}, ignore_eos=False)
        served = live.server.state.served
        assert served is not None
        let = holding(served.engine.engine.constraints(), monkeypatch)
        calls = [Call(lambda i=i: live.complete(guided_regex=f"{SLOW}{i}")) for i in range(5)]
        until(lambda: served.engine.in_flight == 5)
        refused = live.complete()
        let.set()
        assert (refused.status, refused.json["error"]["code"]) == (503, "overloaded")
        assert int(refused.headers["retry-after"]) >= 1
        assert {call.answer.status for call in calls} == {400}
        assert live.complete().status == 200


@full
def test_the_memory_is_back_after_a_hostile_grammar(server: Live):
    def requested(number: int) -> int:
        assert server.complete(guided_regex=f"(a{{1000}}){{{900 + number}}}").status == 400
        return int(psutil.Process().memory_info().rss)

    before = max(requested(i) for i in range(2))
    assert requested(3) - before < 32 << 20
    assert psutil.Process(nursery(server).pid).memory_info().rss < 200 << 20


def test_a_grammar_is_compiled_once_for_all_choices(server: Live, monkeypatch: pytest.MonkeyPatch):
    served = server.server.state.served
    assert served is not None
    factory, compiled = served.engine.engine.constraints(), []
    monkeypatch.setattr(
        factory, "acompile", lambda structured, built=factory.acompile: compiled.append(structured) or built(structured)
    )
    answer = server.complete(guided_choice=["ab", "cd"], n=16, temperature=1, ignore_eos=False)
    assert {choice["text"] for choice in answer.json["choices"]} <= {"ab", "cd"} and len(answer.json["choices"]) == 16
    assert len(compiled) == 1


def test_what_grammars_need_is_read_before_a_request_requests_and_processes_start_with_the_first(bundle: Path):
    """Reading it holds up every stream, by 0.3 s for 49,152 tokens."""
    with Live(bundle, warm_aside=True) as live:
        inner = live.ready().server.state.served.engine.engine  # type: ignore[union-attr]
        until(lambda: inner._factory is not None)
        assert inner._factory._pool.pid is None
        assert live.complete(guided_choice=["ab"], ignore_eos=False).json["choices"][0]["text"] == "ab"


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_whose_grammar_becomes_too_complex_ends_alone(bundle: Path, stream: bool):
    """What its first mask does not show: the pattern comes after a constant."""
    pattern = {"type": "string", "pattern": "^(a{1000}){1000}$"}
    schema = {"type": "object", "properties": {"a": {"const": 1}, "b": pattern}, "required": ["a", "b"]}
    with Live(bundle) as live:
        live.ready()
        other = Call(lambda: live.complete(stream=True, max_tokens=28))
        no_blanks = {str(BYTES.index(blank)): -100 for blank in "ĠĊĉč"}
        answer = live.complete(guided_json=schema, max_tokens=28, logit_bias=no_blanks, stream=stream)
        (last,) = answer.chunks[-1]["choices"] if stream else answer.json["choices"]
        assert (answer.status, last["finish_reason"]) == (200, "error"), answer
        assert other.answer.chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert live.complete(guided_json=GOOD, max_tokens=28, ignore_eos=False).status == 200


def test_a_request_that_compiles_when_the_server_drains_is_still_answered(server: Live, monkeypatch):
    served = server.server.state.served
    assert served is not None
    let = holding(served.engine.engine.constraints(), monkeypatch)
    call = Call(lambda: server.complete(guided_choice=["ab"], ignore_eos=False))
    until(lambda: served.engine.in_flight == 1)
    server.server.stop()
    server.wait(Draining)
    let.set()
    assert (call.answer.status, call.answer.json["choices"][0]["text"]) == (200, "ab")


@default_cases(1)
@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
def test_no_process_remains_after_the_server(bundle: Path, tmp_path: Path, how: str):
    import signal

    with Process(tmp_path / "cache", bundle, "--port", 0) as process:
        process.ready()
        assert process.complete(guided_choice=["ab"], ignore_eos=False)[0] == 200
        children = psutil.Process(process.child.pid).children(recursive=True)
        assert len(children) >= 2
        process.signal(getattr(signal, how))
        process.child.wait(PATIENCE_S)
        until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in children))
        assert os.getpid() not in {p.pid for p in children}
