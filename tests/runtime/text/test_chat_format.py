"""What a chat template takes and its model writes, as found by rendering; and files that state it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llmc.errors import InputError
from llmc.runtime.text.chat import ChatTemplate
from llmc.runtime.text.chat_format import CallNotation, ChatFormat
from tests.runtime.text import notations

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("name", "kind", "marks"),
    [
        ("hermes", "json", {"start": '<tool_call>\n', "end": "\n</tool_call>"}),
        ("llama", "json", {"arguments": "parameters"}),
        ("mistral", "json", {"before": "[TOOL_CALLS] ", "listed": True}),
        ("by name", "json", {"before": "<|tools|>", "after": "<|tools_end|>", "name": "", "listed": True}),
        ("named", "named", {"start": "[TOOL_CALLS]", "name_end": "[ARGS]"}),
        ("with ids", "named", {"before": "<section>", "start": "<call>", "name_end": "<args>", "numbered": True}),
        ("tags", "tags", {"start": "<tool_call>\n<function=", "key": "<parameter=", "value": (">\n", "")}),
        ("typed", "tags", {"before": "<calls>", "value": ('" string="', '">'), "after": "\n</calls>"}),
        ("python", "python", {"before": "", "after": ""}),
        ("bare", "bare", {"start": "<|tool_call>call:", "end": "<tool_call|>", "quote": "<|q|>"}),
        ("harmony", "channels", {}),
    ],
)  # fmt: skip
def test_the_notation_of_calls_is_found(name: str, kind: str, marks: dict[str, Any]) -> None:
    calls = ChatTemplate(notations.ALL[name]).form.calls
    assert calls is not None and calls.kind == kind
    assert {mark: getattr(calls, mark) for mark in marks} == marks


def test_what_a_plain_template_takes() -> None:
    form = ChatTemplate(PLAIN).form
    assert form == ChatFormat(shows_calls=False, several=False)
    assert str(form) == "text alone"


def test_a_template_that_shows_nothing_has_the_default_format() -> None:
    for source in ("", "{{ messages | length }}", "{{ raise_exception('no') }}", "{{ 1 / 0 }}"):
        assert ChatTemplate(source).form == ChatFormat()


JOINED = (
    "{% set t = 'think' ~ ':opensource' %}{% for m in messages if m.reasoning_content %}"
    "<{{ t }}>{{ m.reasoning_content }}</{{ t }}>{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "thinking"),
    [
        (PLAIN + "{# </think> #}", ("<think>", "</think>")),
        (PLAIN + "{# [THINK] [/THINK] #}", ("[THINK]", "[/THINK]")),
        (PLAIN + "{# <|end|> #}", None),
        (PLAIN + JOINED, ("<think:opensource>", "</think:opensource>")),
        (PLAIN, None),
    ],
)
def test_marks_of_reasoning_are_found(source: str, thinking: tuple[str, str] | None) -> None:
    assert ChatTemplate(source).form.thinking == thinking


@pytest.mark.parametrize("name", notations.ALL)
def test_a_format_is_written_and_read_again(name: str) -> None:
    form = ChatTemplate(notations.ALL[name]).form
    assert ChatFormat.read(json.dumps(form.to_dict())) == form
    assert str(form).count("tool calls") == 1


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "5", '{"colour": 1}', '{"thinking": "<think>"}', '{"thinking": ["", "</think>"]}',
        '{"thinking": ["<think>"]}', '{"thinking": [1, 2]}', '{"calls": {"kind": "odd"}}', '{"calls": []}',
        '{"calls": {"kind": "json", "start": 5}}', '{"calls": {"kind": "tags", "key": "", "value_end": "x"}}',
        '{"calls": {"kind": "bare", "quote": " "}}', '{"calls": {"kind": "json", "value": ["a"]}}', "[" * 100_000,
    ],
)  # fmt: skip
def test_other_files_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"not a (chat format|notation)|lacks marks"):
        ChatFormat.read(text)


def test_a_notation_says_what_it_looks_like() -> None:
    hermes = CallNotation("json", start="<tool_call>\n", end="\n</tool_call>")
    form = ChatFormat(thinking=("<think>", "</think>"), calls=hermes)
    assert str(form) == (
        "reasoning between <think> and </think>; tool calls as JSON objects: <tool_call> … </tool_call>"
    )
    assert str(ChatFormat(calls=CallNotation("channels"))).endswith("in channels (Harmony)")
