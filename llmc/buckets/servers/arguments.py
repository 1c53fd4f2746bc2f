"""Command lines of servers built on vLLM: the limits as flags, lists in JSON flags, and the file for --config."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise

from llmc.buckets.limits import Limits
from llmc.buckets.servers.base import Export
from llmc.buckets.servers.settings import flags_of, within
from llmc.errors import InputError

LIMITS = {
    "--max-model-len": "max_model_len",
    "--max-num-seqs": "max_num_seqs",
    "--max-num-batched-tokens": "max_num_batched_tokens",
}


def limit_flags(limits: Limits) -> list[str]:
    """The limits as vLLM's flags, each with its value."""
    return [f"{flag} {getattr(limits, name)}" for flag, name in LIMITS.items()]


def json_flag(flag: str, value: Mapping[str, object]) -> str:
    """A flag whose value is a JSON object."""
    return f"{flag} {json.dumps(value)}"


def config_yaml(arguments: Sequence[str]) -> str:
    """`arguments`, each a flag with its value or alone, as the file that vLLM's --config reads."""
    lines = []
    for argument in arguments:
        name, _, value = argument.removeprefix("--").partition(" ")
        lines.append(f"{name}: " + (f"'{value}'" if value.startswith("{") else value or "true") + "\n")
    return "".join(lines)


def flags(given: Export) -> dict[str, str]:
    """The flags of `given` with their values, "" for a switch."""
    return flags_of([word for argument in given.arguments for word in argument.split(" ", 1)])


def agree(found: Mapping[str, str], limits: Limits) -> None:
    """Raise InputError where one of the flags `found` states another limit than `limits`."""
    for flag, name in LIMITS.items():
        expected = getattr(limits, name)
        if flag in found and found[flag] != str(expected):
            raise InputError(
                f"{flag} {found[flag]} disagrees with {name} {expected}; plan and run the server with the same limits"
            )


def numbers(found: Mapping[str, str], flag: str, path: Sequence[str], least: int = 1) -> list[int] | None:
    """The list of whole numbers at `path` of the JSON in `flag`, as it is written there; None where it is not stated.

    Raises InputError where it is no such list, has a number below 1, or has fewer than `least` of them.
    """
    value = within(flag, found[flag], path) if flag in found else None
    if value is None:
        return None
    if (
        not isinstance(value, list)
        or len(value) < least
        or not all(type(number) is int and number > 0 for number in value)
    ):
        raise InputError(f"{'.'.join((flag, *path))} must be a list of whole numbers above 0, as in [1, 2, 4, 8]")
    return value


def ascending(name: str, values: Sequence[int]) -> None:
    """Raise InputError where `values` do not ascend, or one is there twice."""
    for before, after in pairwise(values):
        if after <= before:
            raise InputError(f"{name}: {after} follows {before}; write each number once, in ascending order")
