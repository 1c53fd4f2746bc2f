"""openai-agents with OpenAIChatCompletionsModel."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool
from openai import AsyncOpenAI
from worker import GREETING, Forecast, Said, Server, run


def agent(server: Server, **options: Any) -> Agent[Any]:
    client = AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0)
    settings = ModelSettings(include_usage=True)  # without it, a stream has no usage
    model = OpenAIChatCompletionsModel(server.model, client)
    return Agent(name="Weather", model=model, model_settings=settings, **options)


def tokens(result: Any) -> tuple[int, int]:
    usage = result.context_wrapper.usage
    return usage.input_tokens, usage.output_tokens


def _ran(server: Server, prompt: str, said: Said, **options: Any) -> Said:
    result = Runner.run_sync(agent(server, **options), prompt, max_turns=4)
    said.text, said.usage = str(result.final_output), tokens(result)
    said.value = result.final_output.model_dump() if isinstance(result.final_output, Forecast) else None
    return said


def _streamed(server: Server, prompt: str, said: Said, **options: Any) -> Said:
    async def streamed() -> Said:
        result = Runner.run_streamed(agent(server, **options), prompt, max_turns=4)
        async for event in result.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                said.chunks.append(event.data.delta)
        said.text, said.usage = str(result.final_output), tokens(result)
        return said

    return asyncio.run(streamed())


def chat(server: Server) -> Said:
    return _ran(server, GREETING, Said())


def stream(server: Server) -> Said:
    return _streamed(server, GREETING, Said())


def loop(server: Server) -> Said:
    said = Said()
    return _ran(server, server.question, said, tools=[function_tool(said.get_weather)])


def loop_streamed(server: Server) -> Said:
    said = Said()
    return _streamed(server, server.question, said, tools=[function_tool(said.get_weather)])


def structured(server: Server) -> Said:
    return _ran(server, server.question, Said(), output_type=Forecast)


def loop_parsed(server: Server) -> Said:
    """A tool and an output type in one run."""
    said = Said()
    return _ran(server, server.question, said, tools=[function_tool(said.get_weather)], output_type=Forecast)


def too_long(server: Server) -> Said:
    try:
        _ran(server, "x" * 40_000, Said())
    except openai.BadRequestError as error:
        return Said(str(error.code), value=str(error))
    raise AssertionError("no error")


run(
    {
        "chat": chat, "stream": stream, "loop": loop, "loop_streamed": loop_streamed, "structured": structured,
        "loop_parsed": loop_parsed, "too_long": too_long,
    }
)  # fmt: skip
