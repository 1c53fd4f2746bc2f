"""pydantic-ai with OpenAIChatModel."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.exceptions import ModelContextWindowExceededError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from worker import GREETING, Forecast, Said, Server, run

OUTPUTS: dict[str, Any] = {
    "tool": ToolOutput(Forecast), "native": NativeOutput(Forecast), "prompted": PromptedOutput(Forecast),
}  # fmt: skip


def agent(server: Server, **options: Any) -> Agent[None, Any]:
    provider = OpenAIProvider(base_url=server.url, api_key="none")
    return Agent(OpenAIChatModel(server.model, provider=provider), **options)


def tokens(usage: Any) -> tuple[int, int]:
    return usage.input_tokens, usage.output_tokens


def chat(server: Server) -> Said:
    result = agent(server).run_sync(GREETING)
    return Said(result.output, usage=tokens(result.usage))


def _streamed(server: Server, prompt: str, said: Said, **options: Any) -> Said:
    async def streamed() -> Said:
        async with agent(server, **options).run_stream(prompt) as result:
            said.chunks = [text async for text in result.stream_text(delta=True, debounce_by=None)]
            said.text, said.usage = "".join(said.chunks), tokens(result.usage)
            return said

    return asyncio.run(streamed())


def stream(server: Server) -> Said:
    return _streamed(server, GREETING, Said())


def loop(server: Server) -> Said:
    said = Said()
    result = agent(server, tools=[said.get_weather]).run_sync(server.question)
    said.text, said.usage = result.output, tokens(result.usage)
    return said


def loop_streamed(server: Server) -> Said:
    said = Said()
    return _streamed(server, server.question, said, tools=[said.get_weather])


def structured(server: Server) -> Said:
    """`parameter` is the kind of output."""
    result = agent(server, output_type=OUTPUTS[server.parameter]).run_sync(server.question)
    return Said(value=result.output.model_dump(), usage=tokens(result.usage))


def loop_parsed(server: Server) -> Said:
    """A tool and a kind of output in one run."""
    said = Said()
    result = agent(server, tools=[said.get_weather], output_type=OUTPUTS[server.parameter]).run_sync(server.question)
    said.value, said.usage = result.output.model_dump(), tokens(result.usage)
    return said


def too_long(server: Server) -> Said:
    try:
        agent(server).run_sync("x" * 40_000)
    except ModelContextWindowExceededError as error:
        return Said("ModelContextWindowExceededError", value=str(error))
    raise AssertionError("no error")


run(
    {
        "chat": chat, "stream": stream, "loop": loop, "loop_streamed": loop_streamed, "structured": structured,
        "loop_parsed": loop_parsed, "too_long": too_long,
    }
)  # fmt: skip
