"""/v1/messages, Anthropic's API: whole and streamed, with thinking, tools and counted tokens."""

from __future__ import annotations

import json

import pytest

from tests.runtime.text import notations
from tests.server.stub_engine import Api

TOOLS = [{"name": "get_weather", "description": "d", "input_schema": notations.SCHEMA}]
GIVEN = {"city": "Ulm", "count": 3}
THINKS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{# </think> #}{{ enable_thinking }}"
USER = {"role": "user", "content": "Hi"}


def send(api, messages=(USER,), path="/v1/messages", **body):
    return api.post(path, {"messages": list(messages), **({} if "count" in path else {"max_tokens": 9}), **body})


def message(api, messages=(USER,), **body):
    answer = send(api, messages, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(api, messages=(USER,), **body):
    answer = send(api, messages, stream=True, **body)
    found = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def rebuilt(events):
    """The content of a stream's message, as Anthropic's own client puts it together."""
    content = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(content)
            content.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            member = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "json"}[delta["type"]]
            content[event["index"]][member] += delta["partial_json" if member == "json" else member]
    for block in content:
        written = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(written)
    return content


def shown(api):
    return api.state.served.tokenizer.decode(api.engine.requests[-1].prompt_token_ids)


@pytest.fixture
def hermes(roomy):
    api = Api(roomy, template=notations.HERMES)
    api.engine.pieces = tuple("Well. " + notations.written(notations.HERMES, [("get_weather", GIVEN)]).text)
    return api


def test_a_text_is_answered(roomy):
    api = Api(roomy)
    found = message(api, system=[{"type": "text", "text": "Be brief."}], temperature=0.5, stop_sequences=["x"])
    assert (found["type"], found["role"], found["stop_reason"]) == ("message", "assistant", "end_turn")
    assert found["content"] == [{"type": "text", "text": "Hello"}] and found["id"].startswith("msg_")
    assert (
        found["usage"]["input_tokens"] == len(api.engine.requests[-1].prompt_token_ids)
        and found["usage"]["output_tokens"] > 0
    )
    params = api.engine.params
    assert (params.max_tokens, params.temperature, params.stop) == (9, 0.5, ("x",)) and "Be brief." in shown(api)


def test_a_stream_has_the_events_of_the_whole(api):
    events = stream(api)
    assert [event["type"] for event in events] == [
        "message_start", "content_block_start", "content_block_delta", "content_block_delta", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert rebuilt(events) == [{"type": "text", "text": "Hello"}]
    assert events[0]["message"]["content"] == [] and events[0]["message"]["stop_reason"] is None
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] > 0


def test_a_tool_is_used_and_its_result_comes_back(hermes):
    found = message(hermes, tools=TOOLS)
    text, use = found["content"]
    assert (text["text"], use["name"], use["input"], found["stop_reason"]) == (
        "Well.",
        "get_weather",
        GIVEN,
        "tool_use",
    )
    assert [block["type"] for block in rebuilt(stream(hermes, tools=TOOLS))] == ["text", "tool_use"]
    assert rebuilt(stream(hermes, tools=TOOLS))[1]["input"] == GIVEN
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "Sunny"}]}
    hermes.engine.pieces = ("It is sunny.",)
    history = [USER, {"role": "assistant", "content": found["content"]}, {"role": "user", "content": [result]}]
    assert message(hermes, history, tools=TOOLS)["content"][0]["text"] == "It is sunny."
    assert "Sunny" in shown(hermes) and "Ulm" in shown(hermes)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_tool_can_be_forced(hermes, choice):
    message(hermes, tools=TOOLS, tool_choice={**choice, "disable_parallel_tool_use": True})
    assert hermes.engine.params.structured_outputs.grammar.startswith("start: call\n")


def test_thinking_is_a_block_and_comes_back(roomy):
    api = Api(roomy, template=THINKS)
    api.engine.pieces = ("<think>Hm.</think>", "Yes.")
    found = message(api, thinking={"type": "enabled", "budget_tokens": 1024})
    assert [block["type"] for block in found["content"]] == ["thinking", "text"]
    assert (found["content"][0]["thinking"], found["content"][1]["text"]) == ("Hm.", "Yes.")
    assert shown(api).endswith("True")
    assert rebuilt(stream(api, thinking={"type": "disabled"})) == found["content"] and shown(api).endswith("False")
    assert message(api, [USER, {"role": "assistant", "content": found["content"]}, USER])["content"]


@pytest.mark.parametrize(
    ("finish", "stop", "expected"),
    [("length", None, ("max_tokens", None)), ("stop", "x", ("stop_sequence", "x")), ("stop", 5, ("end_turn", None))],
)
def test_why_it_ended_is_said(make_api, finish, stop, expected):
    api = make_api()
    api.engine.finish, api.engine.stop_reason = finish, stop
    found = message(api)
    assert (found["stop_reason"], found["stop_sequence"]) == expected


def test_tokens_are_counted(roomy):
    api = Api(roomy, template=notations.HERMES)
    counted = send(api, path="/v1/messages/count_tokens", system="Be brief.", tools=TOOLS)
    assert counted.status_code == 200
    message(api, system="Be brief.", tools=TOOLS)
    assert counted.json() == {"input_tokens": len(api.engine.requests[-1].prompt_token_ids)}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content has a block of type 'image'",
        ),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice of type tool needs name"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is not supported"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_what_cannot_be_done_is_refused_in_this_apis_form(api, body, words):
    answer = send(api, **body)
    assert answer.status_code == 400
    error = answer.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert words in error["error"]["message"]


def test_other_errors_have_this_apis_types(make_api):
    assert send(make_api(), model="other").json()["error"]["type"] == "not_found_error"
    loading = send(make_api(phase="loading"))
    assert (loading.status_code, loading.json()["error"]["type"]) == (503, "overloaded_error")


def test_the_key_may_come_as_anthropics_clients_send_it(make_api):
    api = make_api(api_keys=("secret",))
    body = {"max_tokens": 3, "messages": [USER]}

    def status(**headers):
        return api.ask("POST", "/v1/messages", json=body, headers=headers).status_code

    assert status(**{"x-api-key": "secret"}) == status(Authorization="Bearer secret") == 200
    assert status(**{"x-api-key": "other"}) == status() == 401
    assert status(**{"x-api-key": "other", "Authorization": "Bearer secret"}) == 200
