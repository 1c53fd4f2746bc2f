"""Grammars that force calls: what they take is what the parser reads, in each notation."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from llmc.errors import InputError
from llmc.runtime.engine.sampling.constraints import ConstraintFactory
from llmc.runtime.engine.sampling.params import StructuredOutputsParams
from llmc.runtime.text.call_grammar import answer_grammar, call_grammar
from llmc.runtime.text.chat import ChatTemplate
from llmc.runtime.text.chat_format import CallNotation, ChatFormat
from tests.runtime.text import notations
from tests.runtime.text.notations import FUNCTIONS, Call, written
from tests.runtime.text.test_answer_parser import Read

Takes = Callable[[str, str], bool]
HERMES = ChatFormat(calls=CallNotation("json", start="<tool_call>\n", end="\n</tool_call>", between="\n"))
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
OFFERED = ({"name": "f", "parameters": WEATHER}, {"name": 'say "hi"', "parameters": None})


@pytest.fixture
def takes(toy: Any) -> Takes:
    """Whether a grammar takes a text, as a model with the toy's tokens writes it."""
    source = toy.files.read("tokenizer.json").decode()
    factory = ConstraintFactory(source, toy.manifest.model["vocab_size"], toy.eos_token_ids)

    def taken(grammar: str, text: str) -> bool:
        constraint = factory.compile(StructuredOutputsParams(grammar=grammar))
        for token in [*toy.tokenizer.encode(text), *toy.eos_token_ids]:
            if not constraint.mask()[token]:
                return False
            constraint.accept(token)
        return True

    return taken


def call(name: str = "f", **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def functions() -> list[dict[str, Any]]:
    return [{"name": name, "parameters": schema} for name, schema in FUNCTIONS.items()]


CALLS: list[Call] = [("get_weather", {"city": "Ulm", "count": 3})]
TWO: list[Call] = [*CALLS, ("read-file.v2", {"city": "a <b> c"})]


@pytest.mark.parametrize("name", notations.ALL)
def test_a_grammar_takes_what_the_template_writes(name: str, takes: Takes) -> None:
    source = notations.ALL[name]
    form = ChatTemplate(source).form
    grammar = call_grammar(form, functions(), True, {})
    text = written(source, CALLS).text.lstrip("\n").replace(', "id": "call0"', "")
    assert takes(grammar, text), grammar
    assert Read(text, form=form).calls == CALLS
    for wrong in ("", "Hello", text.replace("get_weather", "other"), text.replace("3", '"x"')):
        assert not takes(grammar, wrong), wrong


@pytest.mark.parametrize("name", [name for name in notations.ALL if name not in (*notations.ONE_AT_A_TIME, "llama")])
def test_several_calls_are_taken_if_allowed(name: str, takes: Takes) -> None:
    source = notations.ALL[name]
    form = ChatTemplate(source).form
    text = re.sub(r', "id": "call\d"', "", written(source, TWO).text.lstrip("\n"))
    several, one = (call_grammar(form, functions(), allowed, {}) for allowed in (True, False))
    assert takes(several, text), several
    assert not takes(one, text)


COLOURS = {"type": "string", "enum": ["red", "light <blue>"]}
ARGUMENTS: list[tuple[Any, Any, list[Any]]] = [
    (COLOURS, "light <blue>", ["green", 1]),
    ({"$ref": "#/$defs/Colour"}, "red", ["green"]),
    ({"$ref": "#/properties/other"}, 5, [{"a": 1}]),
    ({"const": "red"}, "red", ["blue"]),
    ({"type": ["string", "null"]}, "red", []),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "red", []),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, 7, []),
    ({"type": "string", "pattern": "^[a-z]+$"}, "red", []),
    ({"type": "string", "format": "date"}, "2026-01-31", []),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, 7, ["x y"]),
    ({"enum": [1, 2]}, 2, [3]),
    ({}, {"a": ["b"]}, []),
    ({}, "red", []),
]


@pytest.mark.parametrize(("schema", "value", "wrong"), ARGUMENTS)
@pytest.mark.parametrize("name", notations.ALL)
def test_a_value_of_any_schema_is_taken_and_read_back(
    name: str, schema: Any, value: Any, wrong: list[Any], takes: Takes
) -> None:
    source = notations.ALL[name]
    form = ChatTemplate(source).form
    properties = {"city": schema, "other": {"type": "integer"}}
    whole = {"type": "object", "properties": properties, "required": ["city"], "$defs": {"Colour": COLOURS}}
    offered = {"get_weather": whole}
    grammar = call_grammar(form, [{"name": "get_weather", "parameters": whole}], True, {})

    def text(of: Any) -> str:
        calls = [("get_weather", {"city": of})]
        return re.sub(r', "id": "call\d"', "", written(source, calls).text.lstrip("\n"))

    assert takes(grammar, text(value)), grammar
    assert Read(text(value), form=form, functions=offered).calls == [("get_weather", {"city": value})]
    for other in wrong:
        assert not takes(grammar, text(other)), other


def test_an_argument_that_python_cannot_write_is_refused() -> None:
    schema = {"type": "object", "properties": {"a-b": {"type": "string"}}}
    with pytest.raises(InputError, match="'a-b' of 'f' cannot be written in a Python call"):
        call_grammar(ChatTemplate(notations.PYTHON).form, [{"name": "f", "parameters": schema}], True, {})


def test_calls_and_nothing_else_are_taken(takes: Takes) -> None:
    grammar = call_grammar(HERMES, OFFERED, True, {})
    assert takes(grammar, call(city="Ulm"))
    assert takes(grammar, call(city="Ulm") + "\n" + call('say "hi"', any=[1]))
    for wrong in ("", "Hello", call(), call(city=5), call("h", city="Ulm"), call(city="Ulm") + "x"):
        assert not takes(grammar, wrong), wrong


def test_each_function_keeps_the_references_of_its_own_schema(takes: Takes) -> None:
    def schema(kind: str) -> dict[str, Any]:
        return {
            "type": "object", "properties": {"v": {"$ref": "#/$defs/V"}}, "required": ["v"],
            "$defs": {"V": {"type": kind}},
        }  # fmt: skip

    offered = [{"name": "f", "parameters": schema("string")}, {"name": "g", "parameters": schema("integer")}]
    grammar = call_grammar(HERMES, offered, True, {})
    assert takes(grammar, call("f", v="x"))
    assert takes(grammar, call("g", v=5))
    assert not takes(grammar, call("f", v=5))


def test_white_space_is_bounded(takes: Takes) -> None:
    grammar, wide = call_grammar(HERMES, OFFERED[:1], False, {}), call(city="Ulm")
    assert takes(grammar, wide.replace('"Ulm"', '"Ulm"' + " " * 20))
    assert not takes(grammar, wide.replace('"Ulm"', '"Ulm"' + " " * 40))


def test_reasoning_that_the_prompt_has_opened_comes_first(takes: Takes) -> None:
    form = ChatFormat(thinking=("<think>", "</think>"), calls=HERMES.calls)
    grammar = call_grammar(form, OFFERED[:1], False, {}, thinking=True)
    assert takes(grammar, "Hm.\n</think>\n\n" + call(city="Ulm"))
    assert not takes(grammar, call(city="Ulm"))
    assert not takes(call_grammar(form, OFFERED[:1], False, {}), "Hm.</think>" + call(city="Ulm"))


def test_a_message_of_reasoning_may_come_before_a_call_in_channels() -> None:
    grammar = call_grammar(ChatTemplate(notations.HARMONY).form, OFFERED[:1], True, {"<|end|>": 7})
    assert grammar.startswith('start: ("<|channel|>analysis<|message|>" reasoning "<|start|>assistant")? call\n')
    assert "reasoning: /(?s:.*)/ <[7]>\n" in grammar


def test_marks_that_are_special_tokens_are_written_as_tokens() -> None:
    grammar = call_grammar(HERMES, OFFERED[:1], False, {"<tool_call>": 7, "</tool_call>": 8})
    assert '<[7]> "\\n" "{\\"name\\": \\"f\\", \\"arguments\\": "' in grammar and "<[8]>" in grammar


def test_a_tool_with_the_name_of_a_special_token_is_text() -> None:
    offered = [{"name": "<tool>", "parameters": None}]
    for source in (notations.HERMES, notations.TAGS, notations.NAMED, notations.PYTHON, notations.BARE):
        assert "<[9]>" not in call_grammar(ChatTemplate(source).form, offered, True, {"<tool>": 9})


def test_an_unknown_notation_cannot_be_forced() -> None:
    with pytest.raises(InputError, match="no known notation"):
        call_grammar(ChatFormat(), OFFERED, True, {})


@pytest.mark.parametrize(
    ("structured", "answer", "wrong"),
    [
        (StructuredOutputsParams(json=WEATHER), '{"city": "Ulm"}', '{"town": 1}'),
        (StructuredOutputsParams(json_object=True), '{"a": 1}', "[1]"),
        (StructuredOutputsParams(choice=['a "b"', "c/d"]), 'a "b"', "e"),
        (StructuredOutputsParams(regex="[0-9]/[0-9]"), "1/2", "1-2"),
        (StructuredOutputsParams(regex=r"[0-9]\/[0-9]\\/"), "1/2\\/", "1/2"),
    ],
)
def test_a_constraint_begins_behind_reasoning_that_the_prompt_has_opened(
    takes: Takes, structured: StructuredOutputsParams, answer: str, wrong: str
) -> None:
    form = ChatFormat(thinking=("<think>", "</think>"))
    grammar = answer_grammar(form, (structured.kind, getattr(structured, structured.kind)), {}, True)
    assert takes(grammar, f"Hm {{.</think>\n\n{answer}") and takes(grammar, f"</think>{answer}")
    assert not takes(grammar, answer) and not takes(grammar, f"Hm.</think>{wrong}")


@pytest.mark.parametrize("name", notations.ALL)
def test_a_text_is_either_calls_or_an_answer(name: str, takes: Takes) -> None:
    source = notations.ALL[name]
    form = ChatTemplate(source).form
    structured = StructuredOutputsParams(json=WEATHER)
    grammar = call_grammar(form, functions(), True, {}, answer=("json", structured.json))
    text = written(source, CALLS).text.lstrip("\n").replace(', "id": "call0"', "")
    answer = '{"city": "Ulm"}'
    assert takes(grammar, text), grammar
    assert takes(grammar, f"<|channel|>final<|message|>{answer}" if form.in_channels else answer)
    assert not takes(grammar, "Hello") and not takes(grammar, '{"town": 1}')
