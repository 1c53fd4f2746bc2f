"""The columns of a trace: the spellings that are understood.

A name is compared in lower case and without anything but letters and digits, so that "Request tokens",
"request_tokens" and "RequestTokens" are one. Columns that mean none of the four are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from llmc.errors import InputError

SPELLINGS: dict[str, tuple[str, ...]] = {
    "time": (
        *("time", "timestamp", "arrival", "arrived_at", "arrival_time", "arrival_timestamp"),
        *("request_time", "start_time", "submit_time"),
    ),
    "prompt": (
        *("prompt_tokens", "context_tokens", "request_tokens", "input_tokens", "prefill_tokens"),
        *("num_prompt_tokens", "num_input_tokens", "num_prefill_tokens"),
        *("prompt_len", "prompt_length", "input_len", "input_length"),
    ),
    "output": (
        *("output_tokens", "generated_tokens", "response_tokens", "completion_tokens", "decode_tokens"),
        *("num_output_tokens", "num_generated_tokens", "num_completion_tokens", "num_decode_tokens"),
        *("output_len", "output_length", "completion_len", "completion_length", "response_len", "response_length"),
    ),
    "cached": ("cached_tokens", "cached_prompt_tokens", "prefix_tokens", "num_cached_tokens", "cached_len"),
}
"""For each thing a trace tells of a request, what its column may be called; the first is what llmc writes."""

SHOWN = 12
"""Columns that a message lists at most."""


class Columns(NamedTuple):
    """Places of the columns in the header or record they were resolved from; None where there is no such column."""

    time: int | None
    prompt: int
    output: int
    cached: int | None


def resolve(names: Sequence[str], where: str) -> Columns:
    """The columns among `names`; `where` ("trace.csv: line 1") opens messages.

    Raises InputError, listing the names, when the prompt or the output column is missing or two names mean the same.
    """
    places: dict[str, int] = {}
    for place, name in enumerate(names):
        meaning = _MEANINGS.get(_plain(name))
        if meaning is None:
            continue
        if meaning in places:
            raise InputError(
                f"{where}: the columns {names[places[meaning]]!r} and {name!r} both mean the {meaning}; "
                "remove or rename one"
            )
        places[meaning] = place
    for meaning in ("prompt", "output"):
        if meaning not in places:
            raise InputError(
                f"{where}: no column for the {meaning} tokens; found {_listed(names)}; "
                f"name one of them {', '.join(SPELLINGS[meaning])}"
            )
    return Columns(places.get("time"), places["prompt"], places["output"], places.get("cached"))


def _plain(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())


_MEANINGS = {_plain(spelling): meaning for meaning, spellings in SPELLINGS.items() for spelling in spellings}


def _listed(names: Sequence[str]) -> str:
    if not names:
        return "none"
    shown = [name if len(name) <= 40 else name[:37] + "..." for name in names[:SHOWN]]
    return ", ".join(map(repr, shown)) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
