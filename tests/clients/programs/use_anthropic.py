"""Anthropic's own package, over /v1/messages."""

from __future__ import annotations

from typing import Any

import anthropic
from anthropic import Anthropic
from worker import ARGUMENTS, GREETING, Forecast, Said, Server, run

TOOL: Any = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": ARGUMENTS,
}


def options(server: Server, messages: list[Any]) -> dict[str, Any]:
    return {"model": server.model, "max_tokens": 500, "messages": messages}


def client(server: Server) -> Anthropic:
    return Anthropic(base_url=server.url.removesuffix("/v1"), api_key="none", max_retries=0)


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def tokens(message: Any) -> tuple[int, int]:
    usage = message.usage
    return usage.input_tokens + (usage.cache_read_input_tokens or 0), usage.output_tokens


def chat(server: Server) -> Said:
    answer = client(server).messages.create(**options(server, user(GREETING)))
    counted = client(server).messages.count_tokens(model=server.model, messages=user(GREETING))
    assert counted.input_tokens == tokens(answer)[0]
    return Said(text_of(answer), usage=tokens(answer))


def stream(server: Server) -> Said:
    with client(server).messages.stream(**options(server, user(GREETING))) as events:
        chunks = list(events.text_stream)
        answer = events.get_final_message()
    return Said(text_of(answer), chunks, tokens(answer))


def _loop(server: Server, streamed: bool) -> Said:
    said, messages = Said(), user(server.question)
    while True:
        given = options(server, messages) | {"tools": [TOOL]}
        if streamed:
            with client(server).messages.stream(**given) as events:
                said.chunks = list(events.text_stream)
                answer = events.get_final_message()
        else:
            answer = client(server).messages.create(**given)
        said.usage = tokens(answer)
        calls = [block for block in answer.content if block.type == "tool_use"]
        assert answer.stop_reason == ("tool_use" if calls else "end_turn")
        if not calls:
            said.text = text_of(answer)
            return said
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": said.get_weather(**call.input)}
            for call in calls
        ]  # fmt: skip
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]


def loop(server: Server) -> Said:
    return _loop(server, streamed=False)


def loop_streamed(server: Server) -> Said:
    return _loop(server, streamed=True)


def parse_tool(server: Server) -> Said:
    tool = {"name": "forecast", "description": "A forecast.", "input_schema": Forecast.model_json_schema()}
    choice = {"type": "tool", "name": "forecast"}
    answer = client(server).messages.create(
        **options(server, user(server.question)), tools=[tool], tool_choice=choice
    )  # fmt: skip
    (call,) = (block for block in answer.content if block.type == "tool_use")
    return Said(value=Forecast.model_validate(call.input).model_dump(), usage=tokens(answer))


def too_long(server: Server) -> Said:
    try:
        client(server).messages.create(**options(server, user("x" * 40_000)))
    except anthropic.BadRequestError as error:
        return Said(str(error.body["error"]["type"]), value=str(error))  # type: ignore[index, call-overload]
    raise AssertionError("no error")


run(
    {
        "chat": chat, "stream": stream, "loop": loop, "loop_streamed": loop_streamed, "parse_tool": parse_tool,
        "too_long": too_long,
    }
)  # fmt: skip
