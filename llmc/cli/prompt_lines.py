"""Prompts from a file or standard input: JSON lines, each with how to sample it, or plain lines.

    line     = {"prompt": text | [token id, …]} | {"messages": [message, …]}, with members that SamplingParams has
    message  = {"role": …, "content": …}

A member of a line wins over the flag of its name. Members that are unknown, or that one printed text could not show,
are refused by name and line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llmc.errors import InputError

if TYPE_CHECKING:
    from llmc.runtime.engine.sampling.params import SamplingParams

_NOT_SHOWN = ("n", "best_of", "logprobs", "prompt_logprobs", "output_kind", "structured_outputs", "detokenize")

Asked = tuple[Any, "SamplingParams"]
"""A prompt, as BundleLLM takes it, and how to sample it."""


def parse(text: str, source: str, flags: Mapping[str, Any]) -> list[Asked]:
    """JSON lines when the first line is a JSON object, else each line is a prompt; `flags` are sampling parameters.

    Raises InputError, naming `source`, the line and what is wrong with it.
    """
    from llmc.runtime.engine.sampling.params import SamplingParams

    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines or not lines[0][1].lstrip().startswith("{"):
        common = SamplingParams(**flags)
        return [(line, common) for _, line in lines]
    found: list[Asked] = []
    for number, line in lines:
        try:
            found.append(_asked(line, flags))
        except InputError as e:
            raise InputError(f"{source}, line {number}: {e}") from None
    return found


def _asked(line: str, flags: Mapping[str, Any]) -> Asked:
    from dataclasses import fields

    from llmc.runtime.engine.sampling.params import SamplingParams
    from llmc.runtime.text.chat import check_messages

    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise InputError(f"not JSON ({e})") from None
    if not isinstance(value, dict) or ("prompt" in value) == ("messages" in value):
        raise InputError("needs a field prompt or messages, and one of them")
    allowed = [f.name for f in fields(SamplingParams) if f.name not in _NOT_SHOWN]
    given = {name: member for name, member in value.items() if name not in ("prompt", "messages")}
    if unknown := sorted(given.keys() - set(allowed)):
        raise InputError(f"unknown field {unknown[0]!r}; known: prompt, messages, {', '.join(allowed)}")
    params = SamplingParams(**{**flags, **{name: member for name, member in given.items() if member is not None}})
    if "messages" in value:
        check_messages(value["messages"])
        return {"messages": value["messages"]}, params
    if not _is_prompt(value["prompt"]):
        raise InputError("prompt is neither a text nor a list of token ids")
    return value["prompt"], params


def _is_prompt(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(type(token) is int for token in value))
