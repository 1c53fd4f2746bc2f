"""smolagents: OpenAIModel, and ToolCallingAgent with it."""

from __future__ import annotations

from typing import Any

import openai
from smolagents import ChatMessage, OpenAIModel, Tool, ToolCallingAgent
from smolagents.models import MessageRole
from worker import GREETING, Forecast, Said, Server, run


class Weather(Tool):  # type: ignore[misc]
    name = "get_weather"
    description = "The weather in a city."
    inputs = {  # noqa: RUF012
        "city": {"type": "string", "description": "The name of the city."},
        "days": {"type": "integer", "description": "The number of days."},
    }
    output_type = "string"

    def __init__(self, said: Said) -> None:
        super().__init__()
        self.said = said

    def forward(self, city: str, days: int) -> str:
        return self.said.get_weather(city, days)


def model(server: Server) -> OpenAIModel:
    return OpenAIModel(model_id=server.model, api_base=server.url, api_key="none", client_kwargs={"max_retries": 0})


def user(text: str) -> list[ChatMessage]:
    return [ChatMessage(MessageRole.USER, [{"type": "text", "text": text}])]


def tokens(usage: Any) -> tuple[int, int] | None:
    return None if usage is None else (usage.input_tokens, usage.output_tokens)


def chat(server: Server) -> Said:
    answer = model(server).generate(user(GREETING))
    return Said(answer.content, usage=tokens(answer.token_usage))


def stream(server: Server) -> Said:
    said = Said()
    for delta in model(server).generate_stream(user(GREETING)):
        said.chunks += [delta.content] if delta.content else []
        said.usage = tokens(delta.token_usage) or said.usage
    said.text = "".join(said.chunks)
    return said


def _loop(server: Server, streamed: bool) -> Said:
    said = Said()
    agent = ToolCallingAgent(
        tools=[Weather(said)], model=model(server), max_steps=3, stream_outputs=streamed, return_full_result=True
    )
    result = agent.run(server.question)
    assert result.state == "success"
    said.text, said.usage = str(result.output), tokens(result.token_usage)
    return said


def loop(server: Server) -> Said:
    return _loop(server, streamed=False)


def loop_streamed(server: Server) -> Said:
    return _loop(server, streamed=True)


def structured(server: Server) -> Said:
    schema = {"name": "Forecast", "schema": Forecast.model_json_schema()}
    answer = model(server).generate(
        user(server.question), response_format={"type": "json_schema", "json_schema": schema}
    )
    value = Forecast.model_validate_json(answer.content).model_dump()
    return Said(value=value, usage=tokens(answer.token_usage))


def too_long(server: Server) -> Said:
    try:
        model(server).generate(user("x" * 40_000))
    except openai.BadRequestError as error:
        return Said(str(error.code), value=str(error))
    raise AssertionError("no error")


run(
    {
        "chat": chat, "stream": stream, "loop": loop, "loop_streamed": loop_streamed, "structured": structured,
        "too_long": too_long,
    }
)  # fmt: skip
