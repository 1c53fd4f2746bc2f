"""langchain-openai, over Chat Completions unless RESPONSES."""

from __future__ import annotations

from typing import Any

import openai
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from worker import GREETING, Case, Forecast, Said, Server, run

RESPONSES = False


def model(server: Server, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model=server.model, base_url=server.url, api_key="none", use_responses_api=RESPONSES, max_retries=0,
        stream_usage=True, **options,
    )  # fmt: skip


def tokens(message: Any) -> tuple[int, int] | None:
    usage = message.usage_metadata
    return None if usage is None else (usage["input_tokens"], usage["output_tokens"])


def chat(server: Server) -> Said:
    answer = model(server).invoke(GREETING)
    return Said(answer.text, usage=tokens(answer))


def stream(server: Server) -> Said:
    chunks = list(model(server).stream(GREETING))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    return Said(whole.text, [chunk.text for chunk in chunks if chunk.text], tokens(whole))


def _loop(server: Server, streamed: bool) -> Said:
    said, messages = Said(), [HumanMessage(server.question)]
    weather = tool(said.get_weather)
    bound = model(server).bind_tools([weather])
    while True:
        answer: Any = None
        if streamed:
            said.chunks = []
            for chunk in bound.stream(messages):
                said.chunks += [chunk.text] if chunk.text else []
                answer = chunk if answer is None else answer + chunk
        else:
            answer = bound.invoke(messages)
        messages.append(answer)
        assert not answer.invalid_tool_calls
        if not answer.tool_calls:
            said.text, said.usage = answer.text, tokens(answer)
            return said
        messages += [weather.invoke(call) for call in answer.tool_calls]


def loop(server: Server) -> Said:
    return _loop(server, streamed=False)


def loop_streamed(server: Server) -> Said:
    return _loop(server, streamed=True)


def structured(server: Server) -> Said:
    """`parameter` is the method of with_structured_output."""
    chain = model(server).with_structured_output(Forecast, method=server.parameter, include_raw=True)  # type: ignore[arg-type]
    answer: Any = chain.invoke(server.question)
    assert answer["parsing_error"] is None
    return Said(value=answer["parsed"].model_dump(), usage=tokens(answer["raw"]))


def too_long(server: Server) -> Said:
    try:
        model(server).invoke("x" * 40_000)
    except openai.BadRequestError as error:
        return Said(type(error).__name__, value=str(error))
    raise AssertionError("no error")


CASES: dict[str, Case] = {
    "chat": chat, "stream": stream, "loop": loop, "loop_streamed": loop_streamed, "structured": structured,
    "too_long": too_long,
}  # fmt: skip

if __name__ == "__main__":
    run(CASES)
