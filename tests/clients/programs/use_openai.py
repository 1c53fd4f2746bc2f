"""OpenAI's own package."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
from openai import AsyncOpenAI, OpenAI
from worker import ARGUMENTS, GREETING, Forecast, Said, Server, run

FIRST_CHOICE: dict[str, Any] = {"": "auto", "required": "required"}
USAGE: Any = {"include_usage": True}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "strict": True,
        "parameters": {**ARGUMENTS, "additionalProperties": False},
    },
}


def client(server: Server) -> OpenAI:
    return OpenAI(base_url=server.url, api_key="none", max_retries=0)


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def tokens(usage: Any) -> tuple[int, int] | None:
    return None if usage is None else (usage.prompt_tokens, usage.completion_tokens)


def chat(server: Server) -> Said:
    answer = client(server).chat.completions.create(model=server.model, messages=user(GREETING))
    return Said(answer.choices[0].message.content or "", usage=tokens(answer.usage))


def stream(server: Server) -> Said:
    said = Said()
    for chunk in client(server).chat.completions.create(
        model=server.model, messages=user(GREETING), stream=True, stream_options=USAGE
    ):
        said.chunks += [c.delta.content for c in chunk.choices if c.delta.content]
        said.usage = tokens(chunk.usage)
    said.text = "".join(said.chunks)
    return said


def chat_async(server: Server) -> Said:
    async def complete() -> Said:
        async with AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0) as one:
            answer = await one.chat.completions.create(model=server.model, messages=user(GREETING))
            return Said(answer.choices[0].message.content or "", usage=tokens(answer.usage))

    return asyncio.run(complete())


def loop(server: Server) -> Said:
    """Call the tool until there is no call; `parameter` may force the first one."""
    said, messages, choice = Said(), user(server.question), FIRST_CHOICE[server.parameter]
    while True:
        answer = client(server).chat.completions.create(
            model=server.model, messages=messages, tools=[TOOL], tool_choice=choice
        )
        said.usage, choice = tokens(answer.usage), "auto"
        message = answer.choices[0].message
        if not message.tool_calls:
            assert answer.choices[0].finish_reason == "stop"
            said.text = message.content or ""
            return said
        assert answer.choices[0].finish_reason == "tool_calls"
        messages.append(message)
        for call in message.tool_calls:
            result = said.get_weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def loop_streamed(server: Server) -> Said:
    """The same with the package's own accumulation of a stream."""
    said, messages = Said(), user(server.question)
    while True:
        said.chunks = []
        with client(server).chat.completions.stream(
            model=server.model, messages=messages, tools=[TOOL], stream_options=USAGE
        ) as events:
            for event in events:
                if event.type == "content.delta":
                    said.chunks.append(event.delta)
            answer = events.get_final_completion()
        said.usage = tokens(answer.usage)
        message = answer.choices[0].message
        if not message.tool_calls:
            said.text = message.content or ""
            return said
        messages.append(message)
        for call in message.tool_calls:
            result = said.get_weather(**call.function.parsed_arguments)  # type: ignore[arg-type]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def parse(server: Server) -> Said:
    answer = client(server).chat.completions.parse(
        model=server.model, messages=user(server.question), response_format=Forecast
    )
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Forecast)
    return Said(value=parsed.model_dump(), usage=tokens(answer.usage))


def parse_tool(server: Server) -> Said:
    tool = openai.pydantic_function_tool(Forecast)
    answer = client(server).chat.completions.parse(
        model=server.model, messages=user(server.question), tools=[tool], tool_choice="required"
    )
    (call,) = answer.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Forecast)
    return Said(value=call.function.parsed_arguments.model_dump(), usage=tokens(answer.usage))


def parse_streamed(server: Server) -> Said:
    with client(server).chat.completions.stream(
        model=server.model, messages=user(server.question), response_format=Forecast, stream_options=USAGE
    ) as events:
        answer = events.get_final_completion()
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Forecast)
    return Said(value=parsed.model_dump(), usage=tokens(answer.usage))


def json_object(server: Server) -> Said:
    answer = client(server).chat.completions.create(
        model=server.model, messages=user(server.question), response_format={"type": "json_object"}
    )
    return Said(value=json.loads(answer.choices[0].message.content or ""), usage=tokens(answer.usage))


def loop_parsed(server: Server) -> Said:
    """A tool and a response format in one request: the model calls first, and then answers in the format."""
    said, messages, choice = Said(), user(server.question), FIRST_CHOICE[server.parameter]
    while True:
        answer = client(server).chat.completions.parse(
            model=server.model, messages=messages, tools=[TOOL], tool_choice=choice, response_format=Forecast
        )
        choice = "auto"
        message = answer.choices[0].message
        if not message.tool_calls:
            assert message.parsed is not None
            said.value, said.usage = message.parsed.model_dump(), tokens(answer.usage)
            return said
        messages.append(message)
        for call in message.tool_calls:
            result = said.get_weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def too_long(server: Server) -> Said:
    try:
        client(server).chat.completions.create(model=server.model, messages=user("x" * 40_000))
    except openai.BadRequestError as error:
        return Said(str(error.code), value=str(error))
    raise AssertionError("no error")


def unknown_model(server: Server) -> Said:
    try:
        client(server).chat.completions.create(model="other", messages=user(GREETING))
    except openai.NotFoundError as error:
        return Said(str(error.code), value=str(error))
    raise AssertionError("no error")


run(
    {
        "chat": chat, "chat_async": chat_async, "stream": stream, "loop": loop, "loop_streamed": loop_streamed,
        "parse": parse, "parse_tool": parse_tool, "parse_streamed": parse_streamed, "json_object": json_object,
        "loop_parsed": loop_parsed, "too_long": too_long, "unknown_model": unknown_model,
    }
)  # fmt: skip
