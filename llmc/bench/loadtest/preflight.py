"""Checks of a server before a run: its model, its token counts, and whether it streams."""

from __future__ import annotations

import random
from dataclasses import replace
from time import perf_counter
from typing import Any

from llmc.bench.loadtest.client import Caller, message_of, reason_of
from llmc.bench.loadtest.http import Site
from llmc.bench.loadtest.outcome import Failure, Outcome
from llmc.bench.loadtest.prompts import WORDS, Calibration, text
from llmc.errors import InputError, LlmcError

FEW, MANY = 1, 64
"""Words of the two texts that calibrate; the longer is halved while the server finds it too long."""


async def find_model(caller: Caller) -> Caller:
    """`caller` with a model: its own, or the only or first one that the server lists.

    Raises LlmcError when the server cannot be reached or is not ready, InputError when it wants another key or lists
    no model.
    """
    status, answer = await _ask(caller, "GET", "/v1/models")
    _refuse(caller, status, answer)
    if caller.model:
        return caller
    listed = answer.get("data") if status == 200 and isinstance(answer, dict) else None
    names = [m["id"] for m in listed or () if isinstance(m, dict) and isinstance(m.get("id"), str)]
    if not names:
        raise InputError(
            f"{caller.site.url}/v1/models lists no model ({status}); check the URL, or name one with --model"
        )
    return replace(caller, model=names[0])


async def calibrate(caller: Caller, longest: int) -> Calibration | None:
    """How the server counts the words of `prompts`, from two answers of a token; None: it does not say.

    `longest` is the longest prompt to come, in tokens. These two are sent like the run's requests. So an error that
    every request would meet is raised here, as LlmcError or InputError with the server's answer.
    """
    draw = random.Random("calibration")  # noqa: S311 - a workload, not a secret
    few = await _counted(caller, text(FEW, draw))
    if few is None:
        return None
    words = max(2, min(MANY, longest))
    while True:
        try:
            many = await _counted(caller, text(words, draw))
            break
        except InputError:
            if words == FEW + 1:
                raise
            words = max(FEW + 1, words // 2)
    return None if many is None else Calibration.fit((FEW, few), (words, many))


async def vocabulary(caller: Caller) -> list[int]:
    """Token ids of common words, by the server's own tokenizer. Raises InputError where it has no /tokenize."""
    words = " " + " ".join(dict.fromkeys(WORDS))
    for path, content in (
        ("/tokenize", {"model": caller.model, "prompt": words, "add_special_tokens": False}),
        ("/extras/tokenize", {"input": words}),
    ):
        status, answer = await _ask(caller, "POST", path, content)
        ids = answer.get("tokens") if status == 200 and isinstance(answer, dict) else None
        if isinstance(ids, list) and ids and all(type(i) is int for i in ids):
            return list(dict.fromkeys(ids))
    raise InputError(f"{caller.site.url} has no /tokenize to make --prompt-ids with; leave the flag out")


async def _ask(caller: Caller, method: str, path: str, content: dict[str, Any] | None = None) -> tuple[int, Any]:
    try:
        return await caller.ask(method, path, content)
    except OSError as error:
        raise _unreachable(caller.site, reason_of(error)) from None


async def _counted(caller: Caller, prompt: str) -> int | None:
    """Prompt tokens of a request for one token."""
    outcome = await caller.call(Outcome(0, 0.0, 1, 1), prompt, perf_counter())
    if outcome.failure is not None:
        raise _explained(caller, outcome.failure)
    return outcome.prompt_tokens


def _refuse(caller: Caller, status: int, answer: Any) -> None:
    if status in (401, 403, 429, 503):
        raise _explained(caller, Failure(f"http {status}", message_of(answer, b"")))


def _explained(caller: Caller, failure: Failure) -> LlmcError:
    """The error for a first request that failed: what the server said, and what to do."""
    where, said = caller.site.url, f": {failure.message}" if failure.message else ""
    if failure.kind == "no connection":
        return _unreachable(caller.site, failure.message)
    if failure.kind in ("http 401", "http 403"):
        given = "takes another API key than the one given" if caller.api_key else "wants an API key; give --api-key"
        return InputError(f"{where} {given} ({failure.kind[5:]}){said}")
    if failure.kind == "http 404":
        return InputError(f"{where} has no model {caller.model!r}, or no {caller.endpoint} endpoint (404){said}")
    if failure.refused:
        return LlmcError(f"{where} takes no requests now ({failure.kind[5:]}){said}; try again when it is ready")
    if failure.kind.startswith("http 4"):
        return InputError(f"{where} refuses the kind of request that is to be sent ({failure.kind[5:]}){said}")
    return LlmcError(f"{where} does not answer as a streaming server: {failure.kind}{said}")


def _unreachable(site: Site, reason: str) -> LlmcError:
    return LlmcError(f"{site.url} cannot be reached: {reason}; is the server running there?")
