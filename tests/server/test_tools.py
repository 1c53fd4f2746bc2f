"""Tools: shown by templates that take them, called in Hermes' notation, found in texts and streams, or forced."""

from __future__ import annotations

import json

import pytest

from tests.runtime.text import notations
from tests.server.stub_engine import Api, events, refusal

HERMES = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{# <tool_call> #}{{ messages[0].content }}"
OTHER = "{{ tools | length }}{{ messages[0].content }}"
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "d", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "g"}},
]


def call(name="f", **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


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
def test_a_stream_has_the_arguments_of_each_call_in_pieces(hermes, extra):
    hermes.engine.pieces = (*hermes.engine.pieces[:-1], "\n" + call("g"))
    choices = [c["choices"][0] for c in events(hermes.chat(tools=TOOLS, stream=True, **extra))[:-1]]
    deltas = [c["delta"] for c in choices]
    assert "".join(d.get("content", "") for d in deltas) == "Well."
    pieces = [c for d in deltas for c in d.get("tool_calls", [])]
    begun = [c for c in pieces if "id" in c]
    assert [c["index"] for c in begun] == [0, 1]
    assert [c["function"]["name"] for c in begun] == ["f", "g"]
    arguments = ["".join(c["function"]["arguments"] for c in pieces if c["index"] == i) for i in (0, 1)]
    assert list(map(json.loads, arguments)) == [{"city": "Ulm"}, {}]
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["tool_calls"]


def test_none_shows_no_tools_and_looks_for_no_calls(hermes):
    (choice,) = hermes.chat(tools=TOOLS, tool_choice="none").json()["choices"]
    assert shown(hermes) == "Hi"
    assert choice["finish_reason"] == "stop"
    assert "<tool_call>" in choice["message"]["content"]
    assert hermes.chat(tool_choice="auto").status_code == 200


def some(mode, *names):
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(
    ("choice", "several", "names"),
    [
        ("required", True, ["f", "g"]),
        ({"type": "function", "function": {"name": "g"}}, False, ["g"]),
        (some("required", "g"), True, ["g"]),
        (some("required", "g", "f"), True, ["f", "g"]),
    ],
)
def test_a_call_can_be_forced(hermes, choice, several, names):
    assert hermes.chat(tools=TOOLS, tool_choice=choice).json()["choices"][0]["finish_reason"] == "tool_calls"
    grammar = hermes.engine.params.structured_outputs.grammar
    assert ("( call)*" in grammar) is several
    assert [name for name in ("f", "g") if f'\\"name\\": \\"{name}\\"' in grammar] == names
    hermes.chat(tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    assert "( call)*" not in hermes.engine.requests[-1].params.structured_outputs.grammar


def test_of_some_tools_the_others_are_shown_and_not_called(make_api):
    api = make_api(template=notations.LLAMA)
    api.engine.pieces = ('{"name": "f", "parameters": {"city": "Ulm"}}',)
    assert "tool_calls" in api.chat(tools=TOOLS).json()["choices"][0]["message"]
    assert "tool_calls" not in api.chat(tools=TOOLS, tool_choice=some("auto", "g")).json()["choices"][0]["message"]
    assert shown(api).startswith("f g ")


def test_with_tools_and_a_format_the_answer_is_calls_or_in_the_format(hermes):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}
    hermes.chat(tools=TOOLS, response_format=form)
    grammar = hermes.engine.requests[-1].params.structured_outputs.grammar
    assert '{\\"name\\": \\"f\\"' in grammar and 'answer: %json {"type":"integer"}' in grammar.replace('": "', '":"')
    hermes.chat(tools=TOOLS, response_format=form, tool_choice="required")
    assert "answer" not in hermes.engine.requests[-1].params.structured_outputs.grammar
    hermes.chat(tools=TOOLS, response_format=form, tool_choice="none")
    assert hermes.engine.requests[-1].params.structured_outputs.kind == "json"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": some("auto", "h")}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": some("auto")}, "tool_choice"),
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


@pytest.mark.parametrize("name", notations.ALL)
def test_each_notation_is_called_forced_and_shown_again(roomy, name):
    """Two turns of an agent: the calls of the first answer are the history of the second request."""
    api = Api(roomy, template=notations.ALL[name])
    requested = [{"type": "function", "function": {"name": "get_weather", "parameters": notations.SCHEMA}}]
    given = {"city": "Ulm", "count": 3}
    api.engine.pieces = tuple(notations.written(notations.ALL[name], [("get_weather", given)]).text)
    message = api.chat(tools=requested).json()["choices"][0]["message"]
    (built,) = message["tool_calls"]
    assert (message["content"], json.loads(built["function"]["arguments"])) == (None, given)
    history = [
        {"role": "user", "content": "Hi"},
        message,
        {"role": "tool", "tool_call_id": built["id"], "content": "Sun"},
    ]
    assert api.chat(history, tools=requested).status_code == 200
    prompt = shown(api)
    assert "Sun" in prompt and "Ulm" in prompt and "None" not in prompt
    assert api.chat(tools=requested, tool_choice="required").status_code == 200
    assert "get_weather" in api.engine.requests[-1].params.structured_outputs.grammar


def test_a_call_that_a_stop_string_cuts_leaks_no_mark(hermes):
    hermes.engine.pieces, hermes.engine.finish = ("Well. <tool_call>\n{",), "length"
    message = hermes.chat(tools=TOOLS).json()["choices"][0]["message"]
    assert message["content"].strip() == "Well." and "tool_calls" not in message


THINKS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{# </think> #}{{ opening or '' }}"


@pytest.mark.parametrize("opened", [False, True])
def test_reasoning_is_a_field_of_its_own_whole_and_streamed(make_api, opened):
    api = make_api(template=THINKS)
    api.engine.pieces = ("" if opened else "<think>", "Hm, ", "so.\n</thi", "nk>\n\n", "Yes", ".")
    options = {"chat_template_kwargs": {"opening": "<think>\n"}} if opened else {}
    message = api.chat(**options).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["reasoning"], message["content"]) == ("Hm, so.", "Hm, so.", "Yes.")
    deltas = [c["choices"][0]["delta"] for c in events(api.chat(stream=True, **options))[:-1]]
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "Hm, so."
    assert "".join(d.get("content") or "" for d in deltas) == "Yes."


def test_an_effort_of_reasoning_is_a_variable_of_the_template(make_api):
    api = make_api(template="{{ messages[0].content }}{{ reasoning_effort }}")
    assert api.chat(reasoning_effort="low").status_code == 200
    assert shown(api) == "Hilow"


def test_a_format_holds_behind_reasoning_that_the_prompt_has_opened(make_api):
    api = make_api(template=THINKS)
    options = {"response_format": {"type": "json_object"}, "chat_template_kwargs": {"opening": "<think>\n"}}
    assert api.chat(**options).status_code == 200
    assert api.engine.params.structured_outputs.grammar.startswith("start: reasoning")
    assert api.chat(response_format={"type": "json_object"}).status_code == 200
    assert api.engine.requests[-1].params.structured_outputs.json_object is True
