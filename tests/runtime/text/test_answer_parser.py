"""Answers split into content, reasoning and calls, in the notation that each chat template writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.errors import InputError
from llmc.runtime.text.answer_parser import AnswerParser, AnswerPart, CallArguments, CallStart, Content, Reasoning
from llmc.runtime.text.chat import ChatTemplate
from llmc.runtime.text.chat_format import CallNotation, ChatFormat
from tests.runtime.text import notations
from tests.runtime.text.notations import FUNCTIONS, Call, written
from tests.tiers import examples

HERMES = ChatFormat(calls=CallNotation("json", start="<tool_call>\n", end="\n</tool_call>"))
THINKING = ChatFormat(thinking=("<think>", "</think>"), calls=HERMES.calls)
CASES: dict[str, list[Call]] = {
    "one": [("get_weather", {"city": "Ulm", "count": 3})],
    "text like a number": [("get_weather", {"city": "7"})],
    "none": [("now", {})],
    "line breaks and marks": [("get_weather", {"city": 'a\nb "c" <d> {e} [f] é😀', "flag": False})],
    "nested": [("get_weather", {"city": "x", "deep": {"a": [1, 2.5, None, True], "b": {"c": "d"}}, "items": ["u", 1]})],
    "two": [("get_weather", {"city": "Ulm"}), ("read-file.v2", {"city": "Bonn", "count": -1})],
}


def call(name: str = "f", **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


class Read:
    """What a parser found in a text that came in pieces."""

    def __init__(
        self, text: str, size: int | None = None, form: ChatFormat = HERMES, cut: bool = False,
        functions: Mapping[str, Any] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self.parser = AnswerParser(form, FUNCTIONS if functions is None else functions, **options)
        pieces = [text] if size is None else [text[i : i + size] for i in range(0, len(text), size)]
        self.parts: list[AnswerPart] = [part for piece in pieces for part in self.parser.feed(piece)]
        self.parts += self.parser.flush(cut)
        self.text = "".join(part.text for part in self.parts if isinstance(part, Content))
        self.reasoning = "".join(part.text for part in self.parts if isinstance(part, Reasoning))
        self.names = [part.name for part in self.parts if isinstance(part, CallStart)]
        given = [part for part in self.parts if isinstance(part, CallArguments)]
        self.arguments = ["".join(p.text for p in given if p.index == i) for i in range(len(self.names))]

    @property
    def calls(self) -> list[Call]:
        return list(zip(self.names, map(json.loads, self.arguments), strict=True))


@pytest.mark.parametrize("size", [None, 1, 7])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", notations.ALL)
def test_a_call_is_read_as_its_template_writes_it(name: str, case: str, size: int | None) -> None:
    source, calls = notations.ALL[name], CASES[case]
    if name in notations.ONE_AT_A_TIME:
        calls = calls[:1]
    read = Read(written(source, calls).text, size, ChatTemplate(source).form)
    assert read.calls == calls
    assert read.text.strip() == ""


@pytest.mark.parametrize("size", [None, 1, 3, 11])
@pytest.mark.parametrize(
    ("text", "rest", "calls"),
    [
        ("", "", []),
        ("  just text \n", "  just text \n", []),
        ("a < b <tool <tool_cal", "a < b <tool <tool_cal", []),
        (call(city="Ulm"), "", [("f", {"city": "Ulm"})]),
        (f"Let me see.\n\n{call(x=1)}\n", "Let me see.", [("f", {"x": 1})]),
        (f"{call(x=1)}\n{call('g', y='é😀')}", "", [("f", {"x": 1}), ("g", {"y": "é😀"})]),
        (f"a{call()} b", "a b", [("f", {})]),
        (f"a \n{call()} b\n", "a b", [("f", {})]),
        (call(x="</tool_call>"), "", [("f", {"x": "</tool_call>"})]),
        (call(x="<tool_call>"), "", [("f", {"x": "<tool_call>"})]),
        ('<tool_call>{"name": "f", "arguments": {"x": 1}}', "", [("f", {"x": 1})]),
        ('<tool_call>{"name": "f", "parameters": {"x": 1}}</tool_call>', "", [("f", {"x": 1})]),
        ('<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', "", [("f", {"x": 1})]),
        ('<tool_call>{"name": "now"}</tool_call>', "", [("now", {})]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", {})]),
        ('<tool_call>{"name": "f", "arguments": ""}</tool_call>', "", [("f", {})]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", {"a": 1})]),
        ('<tool_call>{"name": "f", "arguments": {"x": "a\nb\t"}}</tool_call>', "", [("f", {"x": "a\nb\t"})]),
        (
            '<tool_call>{"name": "f", "arguments": {"x": True, "y": None}}</tool_call>',
            "",
            [("f", {"x": True, "y": None})],
        ),
        ('<tool_call>[{"name": "f", "arguments": {}}]</tool_call>', "", [("f", {})]),
        ("<tool_call>nonsense</tool_call> x", "<tool_call>nonsense</tool_call> x", []),
        ('<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu', []),
        ('<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
        ('<tool_call>["f"]</tool_call>', '<tool_call>["f"]</tool_call>', []),
        (f"<tool_call>bad</tool_call>{call()}", "<tool_call>bad</tool_call>", [("f", {})]),
        ('<tool_call>{"name": "f", "arguments": "x"}</tool_call>',) * 2 + ([],),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>',) * 2 + ([],),
    ],
)
def test_calls_are_found_and_the_rest_is_left(text: str, rest: str, calls: list[Call], size: int | None) -> None:
    read = Read(text, size)
    assert (read.text, read.calls) == (rest, calls)


@pytest.mark.parametrize("size", [None, 1, 5])
@pytest.mark.parametrize(
    ("text", "thinking", "reasoning", "rest", "names"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", False, "Hm.", "Yes.", []),
        ("Hm, <b>\n</think>\n\nYes.", True, "Hm, <b>", "Yes.", []),
        (f"I may {call()}?</think>No.", True, f"I may {call()}?", "No.", []),
        (f"<think>Hm.</think>{call()}", False, "Hm.", "", ["f"]),
        (f"<think>a</think>{call()}<think>b</think>{call('g')}", False, "ab", "", ["f", "g"]),
        ("still thinking", True, "still thinking", "", []),
        ("Yes: <think> is a mark.", False, "", "Yes: <think> is a mark.", []),
        ("</think>\n\nYes.", False, "", "Yes.", []),
        ("  Yes.", False, "", "  Yes.", []),
    ],
)
def test_reasoning_is_apart_and_its_calls_are_none(
    text: str, thinking: bool, reasoning: str, rest: str, names: list[str], size: int | None
) -> None:
    read = Read(text, size, THINKING, thinking=thinking)
    assert (read.reasoning, read.text, read.names) == (reasoning, rest, names)


def test_reasoning_is_found_without_tools() -> None:
    parser = AnswerParser(THINKING, None)
    assert parser.feed(f"<think>Hm.</think>{call()}") + parser.flush() == [Reasoning("Hm."), Content(call())]


HARMONY = ChatTemplate(notations.HARMONY).form
ANSWER = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}'
)


@pytest.mark.parametrize("size", [None, 1, 4])
def test_channels_are_reasoning_content_and_calls(size: int | None) -> None:
    read = Read(ANSWER, size, HARMONY)
    assert (read.reasoning, read.text, read.calls) == ("Hm.", "I look.", [("f", {"x": 1})])
    read = Read(
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.", size, HARMONY
    )
    assert (read.reasoning, read.text, read.calls) == ("Hm.", "Yes.", [])
    parser = AnswerParser(HARMONY, None)
    parts = parser.feed("<|channel|>final<|message|>Yes.") + parser.flush()
    assert parts == [Content("Yes.")]


@pytest.mark.parametrize("name", notations.ALL)
def test_a_cut_call_never_leaks_its_marks(name: str) -> None:
    source = notations.ALL[name]
    form = ChatTemplate(source).form
    text = written(source, CASES["one"]).text
    unmarked = form.calls is not None and not (form.calls.before or form.calls.start)
    for length in range(len(text)):
        read = Read(f"{text[:length]}", form=form, cut=True)
        if not unmarked:
            assert read.text.strip() == "" or not any(mark in text for mark in read.text.split()), (length, read.text)
        assert read.names in ([], ["get_weather"])
        for arguments in read.arguments:
            assert arguments.startswith("{")


@examples(150, derandomize=True)
@given(
    st.lists(
        st.sampled_from(
            [
                call(),
                call("g", x="</tool_call>"),
                "<tool_call>",
                "</tool_call>",
                "<think>",
                "</think>",
                " ",
                "\n",
                "a",
                "<",
            ]
        )
    ).map("".join),
    st.integers(1, 7),
    st.booleans(),
)
def test_the_result_does_not_depend_on_how_the_text_comes(text: str, size: int, thinking: bool) -> None:
    one, other = Read(text, size, THINKING, thinking=thinking), Read(text, form=THINKING, thinking=thinking)
    assert (one.text, one.reasoning, one.names, one.arguments) == (
        other.text,
        other.reasoning,
        other.names,
        other.arguments,
    )


@examples(80, derandomize=True)
@given(st.text("<tool_cal>/ \nx").filter(lambda text: "<tool_call>" not in text), st.integers(1, 7))
def test_a_text_without_calls_is_left_as_it_is(text: str, size: int) -> None:
    read = Read(text, size)
    assert (read.text, read.names) == (text, [])


def test_further_calls_are_left_out() -> None:
    read = Read(call(x=1) + call(x=2), limit=1)
    assert (read.text, read.calls) == ("", [("f", {"x": 1})])


def test_text_and_arguments_are_given_as_soon_as_they_are_certain() -> None:
    parser = AnswerParser(HERMES, FUNCTIONS)
    assert parser.feed("Hello wor") == [Content("Hello wor")]
    assert parser.feed("ld ") == [Content("ld")]
    assert parser.feed("<b>") == [Content(" <b>")]
    assert parser.feed("<tool_") == []
    assert parser.feed("box>") == [Content("<tool_box>")]
    assert parser.feed('<tool_call>\n{"name": "f", "argu') == []
    assert parser.feed('ments": {"x": "lo') == [CallStart(0, "f"), CallArguments(0, '{"x": "lo')]
    assert parser.feed("ng") == [CallArguments(0, "ng")]
    assert parser.feed('"}}') == [CallArguments(0, '"}')]


def test_a_json_answer_that_names_no_tool_is_content() -> None:
    form = ChatTemplate(notations.LLAMA).form
    for text in ('{"name": "Ada", "age": 36}', '{"name": "get_weather"', "{", "[1, 2]", "{}"):
        assert Read(text, 3, form).text == text
    assert (
        Read('<|python_tag|>{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}', 3, form).names
        == ["now"] * 2
    )


def test_time_is_in_proportion_to_the_text() -> None:
    parser = AnswerParser(HERMES, FUNCTIONS)
    parser.feed('<tool_call>{"name": "f", "arguments": {"x": "')
    for _ in range(20_000):
        parser.feed("abcde")
    assert len(parser._text) <= 10  # what was read is not kept
    parser.feed('"}}</tool_call>')
    assert parser.calls == 1


@pytest.mark.parametrize("deep", ["[" * 5000, '{"a":' * 5000])
def test_nested_arguments_are_bounded(deep: str) -> None:
    read = Read('<tool_call>{"name": "f", "arguments": {"x": ' + deep)
    assert read.names == ["f"]


OFFERED = {"f": {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}}}, "now": {}}


@pytest.mark.parametrize("size", [None, 1, 6])
@pytest.mark.parametrize(
    ("name", "text", "rest", "calls"),
    [
        ("python", "[] is an empty list.", "[] is an empty list.", []),
        ("python", "[link](x) and [1, 2]", "[link](x) and [1, 2]", []),
        ("python", "[now(), f(s='a, b', n=2)]", "", [("now", {}), ("f", {"s": "a, b", "n": 2})]),
        ("python", r"[f(s='it\'s')]", "", [("f", {"s": "it's"})]),
        ("llama", '{"name": "Bob", "parameters": {"a": 1}}', '{"name": "Bob", "parameters": {"a": 1}}', []),
        ("llama", '{"name": "now", "parameters": {}}, and more', ", and more", [("now", {})]),
        ("llama", '{"name": "now", "parameters": {}} {"result": 1} end', ' {"result": 1} end', [("now", {})]),
        ("named", "Say [TOOL_CALLS] first.", "Say [TOOL_CALLS] first.", []),
        ("named", "[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{}", "", [("f", {})]),
        ("tags", "The `<tool_call>` mark begins a call. So.", "The `<tool_call>` mark begins a call. So.", []),
        ("pairs", "The <tool_call>f begins it.", "The <tool_call>f begins it.", []),
        ("tags", "<tool_call><function=f><parameter=s>7</parameter></function></tool_call>", "", [("f", {"s": "7"})]),
        ("tags", "<tool_call><function=f><parameter=n>7</parameter></function></tool_call>", "", [("f", {"n": 7})]),
        ("tags", "<tool_call><function=now>\n</function></tool_call>", "", [("now", {})]),
        ("bare", '<|tool_call>call:f{s:"a b",n:3}<tool_call|>', "", [("f", {"s": "a b", "n": 3})]),
        ("hermes", f'{call("now")[:-12]}}}}}\n</tool_call> bye', None, [("now", {})]),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}, "arguments": {"y": 2}}</tool_call>', "", [("now", {})]),
    ],
)  # fmt: skip
def test_text_that_only_looks_like_a_call_is_kept(
    name: str, text: str, rest: str | None, calls: list[Call], size: int | None
) -> None:
    read = Read(text, size, ChatTemplate(notations.ALL[name]).form, functions=OFFERED)
    assert read.calls == calls
    assert rest is None or read.text == rest


@pytest.mark.parametrize(
    "value", [r'"\ud83d"', r'"\ud83d\ude00"', r'"\d+"', r'"\u12"', '"a\\\nb"', "NaN", "-Infinity", "1e999"]
)
@pytest.mark.parametrize("late", [False, True])
def test_arguments_are_json_that_utf8_can_encode(value: str, late: bool) -> None:
    pairs = ['"name": "f"', f'"arguments": {{"x": {value}}}']
    read = Read("<tool_call>{" + ", ".join(pairs[::-1] if late else pairs) + "}</tool_call>")
    assert read.names == ["f"]
    json.dumps(read.calls, allow_nan=value == "1e999", ensure_ascii=False)
    read.arguments[0].encode()


def test_a_format_refuses_what_reading_could_not_bear() -> None:
    good = THINKING.to_dict()
    for change in (
        {"thinking": []}, {"thinking": [1, 2]}, {"roles": [1]}, {"several": "yes"}, {"calls": {"kind": "tags"}},
        {"calls": {"kind": "json", "start": "x" * 1000}}, {"calls": {"kind": "json", "listed": 1}},
        {"calls": {"kind": "tags", "words": ["a"]}}, {"calls": {"kind": "bare"}},
    ):  # fmt: skip
        with pytest.raises(InputError, match=r"notation|chat format"):
            ChatFormat.of({**good, **change})
