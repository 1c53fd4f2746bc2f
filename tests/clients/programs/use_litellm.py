"""litellm, with a model of OpenAI's API at another address."""

from __future__ import annotations

import json
from typing import Any

import litellm
from worker import ARGUMENTS, GREETING, Forecast, Said, Server, run

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": ARGUMENTS,
    },
}


def complete(server: Server, messages: list[Any], **options: Any) -> Any:
    return litellm.completion(
        model=f"openai/{server.model}", api_base=server.url, api_key="none", num_retries=0, messages=messages, **options
    )


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def tokens(answer: Any) -> tuple[int, int]:
    return answer.usage.prompt_tokens, answer.usage.completion_tokens


def chat(server: Server) -> Said:
    answer = complete(server, user(GREETING))
    return Said(answer.choices[0].message.content, usage=tokens(answer))


def stream(server: Server) -> Said:
    said = Said()
    for chunk in complete(server, user(GREETING), stream=True, stream_options={"include_usage": True}):
        said.chunks += [c.delta.content for c in chunk.choices if c.delta.content]
        if getattr(chunk, "usage", None) is not None:
            said.usage = tokens(chunk)
    said.text = "".join(said.chunks)
    return said


def _loop(server: Server, streamed: bool) -> Said:
    said, messages = Said(), user(server.question)
    while True:
        if streamed:
            options = {"stream": True, "stream_options": {"include_usage": True}}
            chunks = list(complete(server, messages, tools=[TOOL], **options))
            said.chunks = [c.delta.content for chunk in chunks for c in chunk.choices if c.delta.content]
            answer: Any = litellm.stream_chunk_builder(chunks, messages=messages)
        else:
            answer = complete(server, messages, tools=[TOOL])
        message = answer.choices[0].message
        messages.append(message.model_dump())
        if not message.tool_calls:
            assert answer.choices[0].finish_reason == "stop"
            said.text, said.usage = message.content, tokens(answer)
            return said
        assert answer.choices[0].finish_reason == "tool_calls"
        for call in message.tool_calls:
            result = said.get_weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def loop(server: Server) -> Said:
    return _loop(server, streamed=False)


def loop_streamed(server: Server) -> Said:
    return _loop(server, streamed=True)


def structured(server: Server) -> Said:
    answer = complete(server, user(server.question), response_format=Forecast)
    return Said(
        value=Forecast.model_validate_json(answer.choices[0].message.content).model_dump(), usage=tokens(answer)
    )


def too_long(server: Server) -> Said:
    try:
        complete(server, user("x" * 40_000))
    except litellm.ContextWindowExceededError as error:
        return Said(type(error).__name__, value=str(error))
    raise AssertionError("no error")


run(
    {
        "chat": chat, "stream": stream, "loop": loop, "loop_streamed": loop_streamed, "structured": structured,
        "too_long": too_long,
    }
)  # fmt: skip
