"""OpenAI's own package, over /v1/responses."""

from __future__ import annotations

import json
from typing import Any

import openai
from openai import OpenAI
from worker import ARGUMENTS, GREETING, Forecast, Said, Server, run

TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city.",
    "strict": True,
    "parameters": {**ARGUMENTS, "additionalProperties": False},
}


def client(server: Server) -> OpenAI:
    return OpenAI(base_url=server.url, api_key="none", max_retries=0)


def tokens(answer: Any) -> tuple[int, int] | None:
    return None if answer.usage is None else (answer.usage.input_tokens, answer.usage.output_tokens)


def chat(server: Server) -> Said:
    answer = client(server).responses.create(model=server.model, input=GREETING)
    return Said(answer.output_text, usage=tokens(answer))


def stream(server: Server) -> Said:
    said = Said()
    with client(server).responses.stream(model=server.model, input=GREETING) as events:
        for event in events:
            if event.type == "response.output_text.delta":
                said.chunks.append(event.delta)
        answer = events.get_final_response()
    said.text, said.usage = answer.output_text, tokens(answer)
    return said


def _loop(server: Server, streamed: bool) -> Said:
    said = Said()
    items: list[Any] = [{"role": "user", "content": server.question}]
    while True:
        given: dict[str, Any] = {"model": server.model, "input": items, "tools": [TOOL]}
        if streamed:
            said.chunks = []
            with client(server).responses.stream(**given) as events:
                for event in events:
                    if event.type == "response.output_text.delta":
                        said.chunks.append(event.delta)
                answer: Any = events.get_final_response()
        else:
            answer = client(server).responses.create(**given)
        said.usage = tokens(answer)
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            said.text = answer.output_text
            return said
        items += answer.output
        for call in calls:
            result = said.get_weather(**json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})


def loop(server: Server) -> Said:
    return _loop(server, streamed=False)


def loop_streamed(server: Server) -> Said:
    return _loop(server, streamed=True)


def parse(server: Server) -> Said:
    answer = client(server).responses.parse(model=server.model, input=server.question, text_format=Forecast)
    assert isinstance(answer.output_parsed, Forecast)
    return Said(value=answer.output_parsed.model_dump(), usage=tokens(answer))


def loop_parsed(server: Server) -> Said:
    """A tool and a format in one request: the model calls first, and then answers in the format."""
    said = Said()
    items: list[Any] = [{"role": "user", "content": server.question}]
    while True:
        answer: Any = client(server).responses.parse(
            model=server.model, input=items, tools=[TOOL], text_format=Forecast
        )  # fmt: skip
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            said.value = answer.output_parsed.model_dump()
            return said
        for call in calls:
            result = said.get_weather(**json.loads(call.arguments))
            items.append(
                {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments}
            )
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})


def too_long(server: Server) -> Said:
    try:
        client(server).responses.create(model=server.model, input="x" * 40_000)
    except openai.BadRequestError as error:
        return Said(str(error.code), value=str(error))
    raise AssertionError("no error")


run(
    {
        "chat": chat, "stream": stream, "loop": loop, "loop_streamed": loop_streamed, "parse": parse,
        "loop_parsed": loop_parsed, "too_long": too_long,
    }
)  # fmt: skip
