"""Tools: shown by templates that take them, called in Hermes' notation, found in texts and streams, or forced."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.runtime.engine.sampling.constraints import ConstraintFactory
from llmc.runtime.engine.sampling.params import StructuredOutputsParams
from llmc.server.tool_calls import ToolCall, ToolCallParser, call_grammar
from tests.server.stub_engine import events, refusal
from tests.tiers import examples

HERMES = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{# <tool_call> #}{{ messages[0].content }}"
OTHER = "{{ tools | length }}{{ messages[0].content }}"
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "d", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "g"}},
]


def call(name="f", **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def read(text, size=None, limit=None):
    parser = ToolCallParser(limit)
    pieces = [text] if size is None else [text[i : i + size] for i in range(0, len(text), size)]
    found = [part for piece in pieces for part in parser.feed(piece)] + parser.flush()
    calls = [(c.name, json.loads(c.arguments)) for c in found if isinstance(c, ToolCall)]
    return "".join(part for part in found if isinstance(part, str)), calls


class TestParser:
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
            ('<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
            ("<tool_call>nonsense</tool_call> x", "<tool_call>nonsense</tool_call> x", []),
            ('<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu', []),
            ('<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
            ('<tool_call>["f"]</tool_call>', '<tool_call>["f"]</tool_call>', []),
            (f"<tool_call>bad</tool_call>{call()}", "<tool_call>bad</tool_call>", [("f", {})]),
            ('<tool_call>{"name": "f", "arguments": "x"}</tool_call>',) * 2 + ([],),
        ],
    )
    def test_finds_calls_and_leaves_the_rest(self, text, rest, calls, size):
        assert read(text, size) == (rest, calls)

    @examples(150, derandomize=True)
    @given(
        st.lists(
            st.sampled_from(
                [call(), call("g", x="</tool_call>"), "<tool_call>", "</tool_call>", " ", "\n", "a", "<", '"']
            )
        ).map("".join),
        st.integers(1, 7),
    )
    def test_does_not_depend_on_how_the_text_comes(self, text, size):
        assert read(text, size) == read(text)

    @examples(80, derandomize=True)
    @given(st.text("<tool_cal>/ \nx").filter(lambda text: "<tool_call>" not in text), st.integers(1, 7))
    def test_leaves_a_text_without_calls_as_it_is(self, text, size):
        assert read(text, size) == (text, [])

    def test_leaves_further_calls_out(self):
        assert read(call(x=1) + call(x=2), limit=1) == ("", [("f", {"x": 1})])

    def test_gives_text_as_soon_as_it_is_certain(self):
        parser = ToolCallParser()
        assert parser.feed("Hello wor") == ["Hello wor"]
        assert parser.feed("ld ") == ["ld"]
        assert parser.feed("<b>") == [" <b>"]
        assert parser.feed("<tool_") == []
        assert parser.feed("box>") == ["<tool_box>"]

    def test_takes_time_in_proportion_to_the_text(self):
        parser, pieces = ToolCallParser(), 20_000
        parser.feed('<tool_call>{"name": "f", "arguments": {"x": "')
        for _ in range(pieces):
            parser.feed("abcde")
        assert parser._searched >= 5 * pieces  # what was searched is not searched again
        (found,) = parser.feed('"}}</tool_call>')
        assert len(found.arguments) > 5 * pieces


class TestGrammar:
    @pytest.fixture
    def takes(self, toy):
        source = toy.files.read("tokenizer.json").decode()
        factory = ConstraintFactory(source, toy.manifest.model["vocab_size"], toy.eos_token_ids)

        def takes(grammar, text):
            constraint = factory.compile(StructuredOutputsParams(grammar=grammar))
            for token in [*toy.tokenizer.encode(text), *toy.eos_token_ids]:
                if not constraint.mask()[token]:
                    return False
                constraint.accept(token)
            return True

        return takes

    FUNCTIONS = ({"name": "f", "parameters": WEATHER}, {"name": 'say "hi"', "parameters": None})

    def test_takes_calls_and_nothing_else(self, takes):
        grammar = call_grammar(self.FUNCTIONS, several=True)
        assert takes(grammar, call(city="Ulm"))
        assert takes(grammar, call(city="Ulm") + "\n" + call('say "hi"', any=[1]))
        for wrong in ("", "Hello", call(), call(city=5), call("h", city="Ulm"), call(city="Ulm") + "x"):
            assert not takes(grammar, wrong), wrong

    def test_takes_one_only(self, takes):
        grammar = call_grammar(self.FUNCTIONS[:1], several=False)
        assert takes(grammar, call(city="Ulm"))
        assert not takes(grammar, call(city="Ulm") + "\n" + call(city="Ulm"))
        assert not takes(grammar, call('say "hi"'))

    def test_follows_references_of_each_functions_own_schema(self, takes):
        def schema(kind):
            return {
                "type": "object", "properties": {"v": {"$ref": "#/$defs/V"}}, "required": ["v"],
                "$defs": {"V": {"type": kind}},
            }  # fmt: skip

        grammar = call_grammar(
            [{"name": "f", "parameters": schema("string")}, {"name": "g", "parameters": schema("integer")}],
            several=True,
        )
        assert takes(grammar, call("f", v="x"))
        assert takes(grammar, call("g", v=5))
        assert not takes(grammar, call("f", v=5))

    def test_bounds_white_space(self, takes):
        grammar, wide = call_grammar(self.FUNCTIONS[:1], several=False), call(city="Ulm")
        assert takes(grammar, wide.replace('"Ulm"', '"Ulm"' + " " * 20))
        assert not takes(grammar, wide.replace('"Ulm"', '"Ulm"' + " " * 40))

    def test_what_it_takes_is_what_the_parser_reads(self, takes):
        text = call(city="Ulm") + "\n" + call(city="Köln")
        assert takes(call_grammar(self.FUNCTIONS, several=True), text)
        assert read(text) == ("", [("f", {"city": "Ulm"}), ("f", {"city": "Köln"})])


@pytest.fixture
def hermes(make_api):
    api = make_api(template=HERMES)
    api.engine.pieces = ("Well. ", call(city="Ulm")[:20], call(city="Ulm")[20:], "")
    return api


def shown(api):
    return api.state.served.tokenizer.decode(api.engine.requests[-1].prompt_token_ids)


def test_calls_in_an_answer_are_taken_out_of_its_text(hermes):
    (choice,) = hermes.chat(tools=TOOLS).json()["choices"]
    assert shown(hermes) == "fgHi"
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Well."
    (built,) = choice["message"]["tool_calls"]
    assert built.pop("id").startswith("call_")
    assert built == {"type": "function", "function": {"name": "f", "arguments": '{"city": "Ulm"}'}}


def test_an_answer_of_calls_alone_has_no_content(hermes):
    hermes.engine.pieces = (call("f") + "\n" + call("g"),)
    message = hermes.chat(tools=TOOLS).json()["choices"][0]["message"]
    assert message["content"] is None
    assert [c["function"]["name"] for c in message["tool_calls"]] == ["f", "g"]
    assert len({c["id"] for c in message["tool_calls"]}) == 2
    message = hermes.chat(tools=TOOLS, parallel_tool_calls=False).json()["choices"][0]["message"]
    assert [c["function"]["name"] for c in message["tool_calls"]] == ["f"]


def test_an_answer_without_calls_is_text(hermes):
    hermes.engine.pieces = ("No <b> ", "call. ")
    (choice,) = hermes.chat(tools=TOOLS).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("No <b> call. ", "stop")
    assert "tool_calls" not in choice["message"]


def test_an_answer_that_was_cut_keeps_its_reason(hermes):
    hermes.engine.finish = "length"
    assert hermes.chat(tools=TOOLS).json()["choices"][0]["finish_reason"] == "length"
    assert events(hermes.chat(tools=TOOLS, stream=True))[-2]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("extra", [{}, {"logprobs": True}, {"return_token_ids": True}])
def test_a_stream_has_each_call_whole(hermes, extra):
    hermes.engine.pieces = (*hermes.engine.pieces[:-1], "\n" + call("g"))
    choices = [c["choices"][0] for c in events(hermes.chat(tools=TOOLS, stream=True, **extra))[:-1]]
    deltas = [c["delta"] for c in choices]
    assert "".join(d.get("content", "") for d in deltas) == "Well."
    built = [c for d in deltas for c in d.get("tool_calls", [])]
    assert [c["index"] for c in built] == [0, 1]
    assert [c["function"]["name"] for c in built] == ["f", "g"]
    assert json.loads(built[0]["function"]["arguments"]) == {"city": "Ulm"}
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["tool_calls"]


def test_none_shows_no_tools_and_looks_for_no_calls(hermes):
    (choice,) = hermes.chat(tools=TOOLS, tool_choice="none").json()["choices"]
    assert shown(hermes) == "Hi"
    assert choice["finish_reason"] == "stop"
    assert "<tool_call>" in choice["message"]["content"]
    assert hermes.chat(tool_choice="auto").status_code == 200


@pytest.mark.parametrize(
    ("choice", "rules", "names"),
    [
        ("required", 'start: call ("\\n" call)*', ["f", "g"]),
        ({"type": "function", "function": {"name": "g"}}, "start: call\n", ["g"]),
    ],
)
def test_a_call_can_be_forced(hermes, choice, rules, names):
    assert hermes.chat(tools=TOOLS, tool_choice=choice).json()["choices"][0]["finish_reason"] == "tool_calls"
    grammar = hermes.engine.params.structured_outputs.grammar
    assert grammar.startswith(rules)
    assert [name for name in ("f", "g") if f'\\"name\\": \\"{name}\\"' in grammar] == names
    hermes.chat(tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    assert hermes.engine.requests[-1].params.structured_outputs.grammar.startswith("start: call\n")


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": "f"}, "tools"),
    ],
)
def test_a_choice_that_cannot_be_is_refused(hermes, options, param):
    assert refusal(hermes.chat(**options))["param"] == param


def test_a_template_without_tools_refuses_them(served):
    assert refusal(served.chat(tools=TOOLS))["param"] == "tools"
    assert served.chat(tools=[]).status_code == 200
    assert served.chat(tools=TOOLS, tool_choice="none").status_code == 200


def test_another_notation_is_shown_tools_and_stays_text(make_api):
    api = make_api(template=OTHER)
    api.engine.pieces = (call(),)
    assert api.chat(tools=TOOLS).json()["choices"][0]["message"]["content"] == call()
    assert shown(api) == "2Hi"
    assert refusal(api.chat(tools=TOOLS, tool_choice="required"))["param"] == "tool_choice"
