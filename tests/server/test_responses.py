"""/v1/responses, read by the openai package's own models: whole and streamed, with reasoning, tools and formats."""

from __future__ import annotations

import json

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.runtime.text import notations
from tests.server.stub_engine import Api, refusal

EVENT = TypeAdapter(ResponseStreamEvent)
TOOLS = [{"type": "function", "name": "get_weather", "description": "d", "parameters": notations.SCHEMA}]
GIVEN = {"city": "Ulm", "count": 3}
THINKS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{# </think> #}"


def respond(api, given="Hi", **body):
    answer = api.post("/v1/responses", {"input": given, **body})
    assert answer.status_code == 200, answer.text
    return Response.model_validate(answer.json())


def stream(api, given="Hi", **body):
    answer = api.post("/v1/responses", {"input": given, "stream": True, **body})
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    found = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = EVENT.validate_json(data.removeprefix("data: "))
        assert name == f"event: {event.type}"
        found.append(event)
    assert [event.sequence_number for event in found] == list(range(len(found)))
    return found


def shown(api):
    return api.state.served.tokenizer.decode(api.engine.requests[-1].prompt_token_ids)


@pytest.fixture
def hermes(roomy):
    api = Api(roomy, template=notations.HERMES)
    api.engine.pieces = tuple(notations.written(notations.HERMES, [("get_weather", GIVEN)]).text)
    return api


def test_a_text_is_answered(roomy):
    api = Api(roomy)
    response = respond(api, instructions="Be brief.", max_output_tokens=9, temperature=0.5)
    assert response.output_text == "Hello" and response.status == "completed"
    assert (response.usage.input_tokens, response.usage.output_tokens > 0) == (len(shown(api).encode()), True)
    assert "Be brief." in shown(api)
    params = api.engine.params
    assert (params.max_tokens, params.temperature) == (9, 0.5)


def test_a_stream_has_the_events_of_the_whole(api):
    events = stream(api)
    assert [event.type for event in events] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.delta", "response.output_text.delta", "response.output_text.done",
        "response.content_part.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "Hello"
    assert events[-1].response.output_text == "Hello"


def test_a_call_is_an_item_and_its_result_comes_back(hermes):
    response = respond(hermes, tools=TOOLS)
    (call,) = response.output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "get_weather", GIVEN)
    history = [
        {"role": "user", "content": "Hi"}, call.model_dump(),
        {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny"},
    ]  # fmt: skip
    hermes.engine.pieces = ("It is sunny.",)
    assert respond(hermes, history, tools=TOOLS).output_text == "It is sunny."
    assert "Sunny" in shown(hermes) and "Ulm" in shown(hermes)


def test_the_arguments_of_a_call_are_streamed(hermes):
    events = stream(hermes, tools=TOOLS)
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert len(deltas) > 3 and "".join(deltas) == done.arguments and json.loads(done.arguments) == GIVEN


def test_a_call_can_be_forced(hermes):
    respond(hermes, tools=TOOLS, tool_choice={"type": "function", "name": "get_weather"})
    assert "get_weather" in hermes.engine.params.structured_outputs.grammar


def test_reasoning_is_an_item_and_comes_back(roomy):
    api = Api(roomy, template=THINKS)
    api.engine.pieces = ("<think>Hm.</think>", "Yes.")
    response = respond(api)
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.output[0].content[0].text == "Hm." and response.output_text == "Yes."
    types = [event.type for event in stream(api)]
    assert "response.reasoning_text.delta" in types and "response.reasoning_text.done" in types
    history = [item.model_dump() for item in response.output]
    assert respond(api, [*history, {"role": "user", "content": [{"type": "input_text", "text": "?"}]}]).output_text


def test_a_format_is_a_constraint(api):
    wanted = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    respond(api, text={"format": wanted})
    assert json.loads(api.engine.params.structured_outputs.json) == {"type": "object"}


def test_what_is_cut_is_incomplete(make_api):
    api = make_api()
    api.engine.finish = "length"
    response = respond(api)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert stream(api)[-1].type == "response.incomplete"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "Hi", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "Hi", "conversation": "conv_1"}, "conversation"),
        ({"input": "Hi", "background": True}, "background"),
        ({"input": []}, "input"),
        ({}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, None),
        ({"input": [{"role": "boss", "content": "x"}]}, "input.role"),
        ({"input": "Hi", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "Hi", "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"input": "Hi", "text": {"format": {"type": "xml"}}}, "text.format.type"),
    ],
)
def test_what_cannot_be_done_is_refused_in_the_fields_of_this_api(api, body, param):
    error = refusal(api.post("/v1/responses", body))
    assert error["param"] == param or (param is None and "input_image" in error["message"])
    assert "messages" not in error["message"]
