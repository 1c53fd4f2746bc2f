"""Published chat templates: what clients send renders, and the calls that a template writes are read back."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from llmc.errors import InputError
from llmc.runtime.text.answer_parser import AnswerParser, CallArguments, CallStart, Content
from llmc.runtime.text.chat import ChatTemplate
from llmc.runtime.text.chat_format import ChatFormat
from tests.oracles.conftest import releases

pytestmark = pytest.mark.oracle
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
NOT_CHATS = ("rerank", "embed", "vlm2vec", "dse_qwen2", "zerank")
RECORDED = Path(__file__).with_name("templates.json")
"""How each template writes calls, as docs/serving.md shows it; `make oracles COMPARED=1` writes it."""

SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "description": "A path."}, "count": {"type": "integer", "description": "A number."},
        "deep": {"type": "object", "description": "More."}, "flag": {"type": "boolean", "description": "A switch."},
        "items": {"type": "array", "description": "Several."},
    },
    "required": ["path"],
}  # fmt: skip
NAMES = ("read_file", "get_weather", "now")
TOOLS = [{"type": "function", "function": {"name": n, "description": "d", "parameters": SCHEMA}} for n in NAMES]
CASES: tuple[list[tuple[str, dict[str, Any]]], ...] = (
    [("read_file", {"path": "a/b c.txt", "count": 3})],
    [("read_file", {"path": 'x "q" {z} <b> é', "deep": {"a": [1, 2.5, None, True], "b": {"c": "d"}}, "flag": False})],
    [("now", {})],
    [("get_weather", {"path": "7", "items": ["u", 1]})],
    [("read_file", {"path": "a"}), ("get_weather", {"path": "Rome", "count": -1})],
)
UNREADABLE = {
    "google-gemma-4-31B-it", "google-gemma-4-31B-it-interleaved", "tool_chat_template_gemma4",  # null as Python's None
    "tool_chat_template_functiongemma", "tool_chat_template_gemma3_pythonic", "MiniMax-M3",  # no commas; nested tags
    "tool_chat_template_llama3.2_pythonic", "tool_chat_template_toolace", "tool_chat_template_llama4_pythonic",
}  # fmt: skip
"""Templates that write some values so that they cannot be distinguished; their simple calls are read."""
WITHOUT_COMMAS = "tool_chat_template_gemma3_pythonic"


def published() -> Iterator[Path]:
    for package in ("llama-cpp-python", "vllm"):
        for root in releases(package)[-1:]:
            for path in sorted(root.rglob("*.jinja")):
                if not any(word in path.name for word in NOT_CHATS):
                    yield path


@cache
def opened(path: Path) -> ChatTemplate:
    return ChatTemplate(path.read_text(encoding="utf-8"), TOKENS)


def written(path: Path, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> tuple[str, str] | None:
    """What the template writes for an answer of calls, and the prompt before it; None where it refuses it."""
    template = opened(path)
    user = {"role": "user", "content": "Userq7"}
    for ids in (("callq7id0", "callq7id1"), (f"functions.{calls[0][0]}:0", f"functions.{calls[-1][0]}:1")):
        listed = [
            {"id": ids[i], "type": "function", "function": {"name": name, "arguments": dict(given)}}
            for i, (name, given) in enumerate(calls)
        ]
        try:
            prompt = template.render([user], tools=TOOLS)
            answer = {"role": "assistant", "content": None, "tool_calls": listed}
            whole = template.render([user, answer], tools=TOOLS, add_generation_prompt=False)
        except InputError:
            continue
        start = whole.rfind("Userq7") + len("Userq7")
        if calls[0][0] in whole[start:]:
            return whole[start:], prompt
    return None


def read(text: str, form: ChatFormat, size: int) -> tuple[list[tuple[str, Any]], str]:
    parser = AnswerParser(form, dict.fromkeys(NAMES, SCHEMA))
    parts = [part for i in range(0, len(text), size) for part in parser.feed(text[i : i + size])] + parser.flush()
    names = [part.name for part in parts if isinstance(part, CallStart)]
    given = ["".join(p.text for p in parts if isinstance(p, CallArguments) and p.index == i) for i in range(len(names))]
    said = "".join(part.text for part in parts if isinstance(part, Content))
    return [(name, json.loads(one)) for name, one in zip(names, given, strict=True)], said


def answer_of(text: str, form: ChatFormat) -> str:
    """The part of a rendered turn that its model writes: from the first mark on, without reasoning before it."""
    calls = form.calls
    assert calls is not None
    if form.in_channels:
        return text[text.index(" to=") :]
    marks = (calls.before + "\n" + calls.start).split()
    if marks:
        return text[text.index(marks[0]) :]
    begins = [*NAMES] if calls.kind == "named" else ["{", "["]
    return text[min(at for at in map(text.find, begins) if at >= 0) :]


def notation(path: Path) -> str:
    """How the template's model writes calls; "" where it is not known or the template shows none."""
    form = opened(path).form
    known = form.calls is not None and form.shows_calls and written(path, CASES[0]) is not None
    return form.calls.kind if form.calls is not None and known else ""


@pytest.mark.parametrize("path", list(published()), ids=lambda path: path.stem)
def test_calls_are_read_as_they_are_written(path: Path) -> None:
    form, random_ = opened(path).form, random.Random(path.stem)
    if not notation(path) or path.stem == WITHOUT_COMMAS:
        return
    for calls in CASES[:1] if path.stem in UNREADABLE else CASES:
        if (turn := written(path, calls)) is None:
            continue  # a template for one call at a time
        text = answer_of(turn[0], form)
        results = [read(text, form, size) for size in (len(text), 1, random_.randint(2, 9))]
        assert all(result == results[0] for result in results), results
        in_turns = len(calls) > 1 and [name for name, _ in results[0][0]] == [calls[0][0]]  # one call in each
        assert results[0][0] == calls or in_turns, text


def test_what_the_documentation_says_of_each_template() -> None:
    found = {path.stem: notation(path) for path in published()}
    if "COMPARED" in os.environ:
        RECORDED.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    assert json.loads(RECORDED.read_text(encoding="utf-8")) == found


CALL = {"id": "callq7id0", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "Romaq7"}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "callq7id0", "content": "Resultq7"}
SAID = {"role": "user", "content": "Userq7"}
HISTORIES: Mapping[str, tuple[list[dict[str, Any]], tuple[str, ...]]] = {
    "calls without content": ([SAID, CALLED, RESULT], ("Romaq7", "Resultq7")),
    "a result without content": ([SAID, CALLED, {**RESULT, "content": None}], ("Romaq7",)),
    "empty arguments": (
        [SAID, {**CALLED, "tool_calls": [{**CALL, "function": {"name": "now", "arguments": ""}}]}, RESULT],
        ("now", "Resultq7"),
    ),
    "a developer": ([{"role": "developer", "content": "Sayq7"}, SAID], ("Sayq7", "Userq7")),
    "a developer and the system": (
        [{"role": "system", "content": "Beq7"}, {"role": "developer", "content": "Sayq7"}, SAID],
        ("Beq7", "Sayq7", "Userq7"),
    ),
    "a refusal": (
        [
            SAID,
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "Noq7"}]},
            {**SAID, "content": "Whyq7"},
        ],
        ("Noq7", "Whyq7"),
    ),
}
REFUSED = {
    "CohereForAI-c4ai-command-r-plus-tool_use": "needs additionalProperties in every tool",
    "fireworks-ai-llama-3-firefunction-v2": "wants a variable that only its own server gives",
    "llama-cpp-deepseek-r1": "writes a generator as JSON",
}


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("path", list(published()), ids=lambda path: path.stem)
def test_what_clients_send_back_is_shown(path: Path, history: str) -> None:
    messages, shown = HISTORIES[history]
    template = opened(path)
    tools = TOOLS if "tools" in template.source else None
    if path.stem in REFUSED:
        with pytest.raises(InputError):
            template.render(messages, tools=tools)
        return
    prompt = template.render(messages, tools=tools)
    assert all(word in prompt for word in shown), prompt
    assert "None" not in prompt or "None" in template.source
