"""A bundle's chat template, whatever it does with a conversation, costs that conversation alone."""

from __future__ import annotations

import asyncio
import io
import json
import sys
import time
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from llmc.cli.main import main
from llmc.errors import InputError
from llmc.runtime.async_llm import BundleAsyncLLM
from llmc.runtime.confined.limits import ChildLimits
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.llm import BundleLLM
from llmc.runtime.text import chat, confined_chat
from llmc.testing import toy
from tests.server.live import Answer, Call, Live, toy_bundle
from tests.server.test_hostile_grammars import HEALTHY_S, Health
from tests.tiers import default_cases
from tests.timing import until

LIMITS = ChildLimits(seconds=0.3, memory_bytes=64 << 20, workers=1, waiting=2)
HOSTILE = {
    "spin": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "wide": "{{ '%999999999d' % 1 }}",
    "padded": "{{ 'a'.ljust(10 ** 9) }}",
    "centred": "{{ 'a' | center(width=messages | length * 999999999) }}",
    "grown": "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "listed": "{% set ns = namespace(x=[1]) %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "power": "{% set ns = namespace(x=10) %}{% for i in range(40) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
}
TEMPLATE = (
    "{% set last = messages[-1].content %}"
    + "".join(f"{{% if last == '{name}' %}}{source}{{% endif %}}" for name, source in HOSTILE.items())
    + "{% for m in messages %}{{ m.content }}{% endfor %}"
)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    patch = pytest.MonkeyPatch()
    patch.setattr(toy, "TEMPLATE", TEMPLATE)
    yield toy_bundle(tmp_path_factory.mktemp("hostile"))
    patch.undo()


@pytest.fixture
def server(hostile: Path) -> Iterator[Live]:
    with Live(hostile, template_limits=LIMITS) as live:
        assert ask(live.ready(), "Hi").status == 200
        yield live


def ask(live: Live, text: str, **body: Any) -> Answer:
    sent = {"messages": text, "max_tokens": 2, "temperature": 0, "ignore_eos": True, **body}
    return live.ask("POST", "/v1/chat/completions", sent)


def test_it_is_a_400_that_names_the_limit_and_all_else_goes_on(server: Live):
    with Health(server) as health:
        for name in HOSTILE:
            call = Call(lambda name=name: ask(server, name))
            stream = server.complete(stream=True, max_tokens=20)
            assert stream.chunks[-1]["choices"][0]["finish_reason"] == "length", name
            assert call.answer.status == 400, (name, call.answer)
            said = call.answer.json["error"]["message"]
            assert ("0.3 s of processor time" if name in ("spin", "power") else "memory") in said, (name, said)
            assert ask(server, "Hi").status == 200, name
    assert health.worst < HEALTHY_S


def test_tokenize_renders_the_same_way(server: Live):
    answer = server.ask("POST", "/tokenize", {"messages": "spin"})
    assert answer.status == 400 and "processor time" in answer.text
    assert server.ask("POST", "/tokenize", {"messages": "ab"}).json["tokens"] == [toy.BYTES.index(c) for c in "ab"]


def test_a_client_that_leaves_takes_its_rendering_with_it(hostile: Path):
    with Live(hostile, template_limits=ChildLimits(seconds=600.0)) as live:
        live.ready()
        template = pool(live)
        body = json.dumps({"messages": "spin"}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: "
        with live.connect() as connection:
            connection.sendall(head + str(len(body)).encode() + b"\r\n\r\n" + body)
            until(lambda: template.pid is not None and bool(psutil.Process(template.pid).children()))
        until(lambda: not psutil.Process(template.pid).children())
        assert ask(live, "Hi").status == 200


def test_more_than_may_wait_are_refused_at_once(server: Live):
    calls = [Call(lambda: ask(server, "spin")) for _ in range(6)]
    answers = [call.answer for call in calls]
    assert {a.status for a in answers} == {400, 503}
    assert all(a.headers["retry-after"] == "1" for a in answers if a.status == 503)
    assert ask(server, "Hi").status == 200


def test_a_child_that_was_killed_costs_its_conversation_nothing_else(server: Live):
    psutil.Process(pool(server).pid).kill()
    assert ask(server, "Hi").status == 200


def test_a_template_that_does_not_parse_is_refused_before_the_server_is_ready(tmp_path, monkeypatch):
    monkeypatch.setattr(toy, "TEMPLATE", "{% if %}")
    with Live(toy_bundle(tmp_path), template_limits=LIMITS, warm_aside=True) as live:
        until(lambda: live.error is not None)
    assert isinstance(live.error, InputError) and "does not parse (line 1)" in str(live.error)


def test_constants_are_folded_in_the_child_however_large_they_become(tmp_path, monkeypatch):
    """jinja2 does it when it parses, which a server does not do itself."""
    monkeypatch.setattr(toy, "TEMPLATE", "{{ 'a' | center(500000000) }}{{ messages[0].content }}")
    monkeypatch.setattr(chat, "_compile", None)
    with Live(toy_bundle(tmp_path), template_limits=LIMITS, warm_aside=True) as live:
        answer = ask(live.ready(), "Hi")
    assert answer.status == 400 and "memory" in answer.text


def test_a_warm_server_has_started_it_and_leaves_nothing(bundle: Path):
    with Live(bundle, warm_aside=True) as live:
        live.ready()
        family = [psutil.Process(pool(live).pid), *psutil.Process(pool(live).pid).children()]
        began = time.perf_counter()
        assert ask(live, "Hi").status == 200
        assert time.perf_counter() - began < HEALTHY_S
    until(lambda: not any(p.is_running() for p in family))


def pool(live: Live) -> Any:
    served = live.server.state.served
    assert served is not None and served.chat_template is not None
    return served.chat_template._pool  # type: ignore[attr-defined]


@default_cases(1)
@pytest.mark.parametrize("way", ["chat", "generate"])
def test_callers_of_one_event_loop_do_not_wait_for_a_template(
    hostile: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(confined_chat, "LIMITS", replace(LIMITS, workers=2))

    async def said(llm: BundleAsyncLLM, content: str) -> str:
        messages, params = [{"role": "user", "content": content}], SamplingParams(max_tokens=2, ignore_eos=True)
        outputs = llm.chat(messages, params) if way == "chat" else llm.generate({"messages": messages}, params)
        async with aclosing(outputs):
            return [output async for output in outputs][-1].outputs[0].text

    before = set(psutil.Process().children())  # of other tests in this process

    async def callers() -> None:
        async with BundleAsyncLLM(hostile) as llm:
            await said(llm, "Hi")
            for name in ("spin", "grown"):
                harmful = asyncio.ensure_future(said(llm, name))
                assert await said(llm, "Hi")
                assert name == "grown" or not harmful.done()
                with pytest.raises(InputError, match="takes more"):
                    await harmful
            assert await said(llm, "Hi")
        assert set(psutil.Process().children()) <= before

    asyncio.run(callers())


@default_cases(3)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_program_that_holds_a_conversation_gets_one_error(
    hostile: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(confined_chat, "LIMITS", LIMITS)
    before, began = set(psutil.Process().children()), psutil.Process().memory_info().rss
    with BundleLLM(hostile) as llm:
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        for conversation in ({"messages": [{"role": "user", "content": name}]}, None):
            with pytest.raises(InputError, match=r"the chat template (cannot be rendered .*: it )?takes"):
                if conversation is None:
                    llm.chat([{"role": "user", "content": "Hi"}], params, chat_template=HOSTILE[name])
                else:
                    llm.generate(conversation, params)
        assert llm.chat([{"role": "user", "content": "Hi"}], params)[0].outputs[0].token_ids
    assert set(psutil.Process().children()) <= before
    assert psutil.Process().memory_info().rss - began < 64 << 20


def test_the_command_line_stops_a_template_too(
    hostile: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(confined_chat, "LIMITS", LIMITS)
    assert main(["generate", str(hostile), "--chat", "--prompt", "spin"]) == 2
    assert "the chat template cannot be rendered with these messages" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", io.StringIO("padded\n"))
    assert main(["chat", str(hostile)]) == 2
    assert "the chat template takes more memory for these messages than there is" in capsys.readouterr().err
