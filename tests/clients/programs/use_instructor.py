"""instructor over OpenAI's package."""

from __future__ import annotations

import instructor
from instructor.core.exceptions import InstructorRetryException
from openai import OpenAI
from worker import Forecast, Said, Server, run


def client(server: Server, mode: str) -> instructor.Instructor:
    return instructor.from_openai(
        OpenAI(base_url=server.url, api_key="none", max_retries=0), mode=instructor.Mode[mode]
    )


def structured(server: Server) -> Said:
    """`parameter` is the mode."""
    forecast, answer = client(server, server.parameter).create_with_completion(
        model=server.model,
        response_model=Forecast,
        messages=[{"role": "user", "content": server.question}],
        max_retries=0,
    )
    return Said(value=forecast.model_dump(), usage=(answer.usage.prompt_tokens, answer.usage.completion_tokens))


def structured_streamed(server: Server) -> Said:
    """Objects as far as they have come, in the mode `parameter`."""
    parts = list(
        client(server, server.parameter).create_partial(
            model=server.model, response_model=Forecast, messages=[{"role": "user", "content": server.question}],
            max_retries=0,
        )
    )  # fmt: skip
    return Said(value=parts[-1].model_dump(), chunks=[str(part.city) for part in parts])


def too_long(server: Server) -> Said:
    try:
        client(server, "TOOLS").create(
            model=server.model, response_model=Forecast, messages=[{"role": "user", "content": "x" * 40_000}],
            max_retries=0,
        )  # fmt: skip
    except InstructorRetryException as error:
        return Said(type(error).__name__, value=str(error))
    raise AssertionError("no error")


run({"structured": structured, "structured_streamed": structured_streamed, "too_long": too_long})
