"""Command lines of servers: the limits as flags, lists in JSON flags, and the file for vLLM's --config."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

from llmc.buckets.limits import Limits
from llmc.buckets.servers import config_file, line
from llmc.buckets.servers.base import Export
from llmc.buckets.servers.settings import flags_of, within
from llmc.errors import InputError

LIMITS = {
    "--max-model-len": "max_model_len",
    "--max-num-seqs": "max_num_seqs",
    "--max-num-batched-tokens": "max_num_batched_tokens",
}


def limit_flags(limits: Limits, names: Mapping[str, str] = LIMITS) -> list[str]:
    """The limits as flags, vLLM's unless `names` has others, each with its value."""
    return [f"{flag} {getattr(limits, name)}" for flag, name in names.items()]


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
    """The flags of `given` with their values, "" for a switch: those of YAML files, whose keys stand for flags as in a
    file for --config, and over them those of the command line. Raises InputError, naming it, for a file that is none.
    """
    found: dict[str, str] = {}
    for name, text in given.files.items():
        if name.endswith((".yaml", ".yml")):
            found |= config_file.flags(config_file.load(text, name))
    return found | flags_of([word for argument in given.arguments for word in _words(argument)])


def _words(argument: str) -> list[str]:
    """A flag and its value, or "flag=value"."""
    name, _, value = argument.partition(" ")
    return [argument] if "=" in name or not value else [name, value]


def agree(found: Mapping[str, str], limits: Limits, names: Mapping[str, str] = LIMITS) -> None:
    """Raise InputError where one of the flags `found` states another limit than `limits`; `names` has both."""
    for spelled, name in names.items():
        flag, expected = spelled.replace("_", "-"), getattr(limits, name)
        if flag in found and found[flag] != str(expected):
            raise InputError(
                f"{flag} {found[flag]} disagrees with {name} {expected}; plan and run the server with the same limits"
            )


def stated(given: Export, flag: str, names: Collection[str], key: str = "") -> dict[str, str]:
    """The flags of `given`, those of its files for --config included; the command line wins.

    A file with one of `names` is what `flag`, a flag for JSON, has, at its `key` where there is one. Raises InputError
    for files that are no mappings.
    """
    found: dict[str, str] = {}
    for file, text in given.files.items():
        config = config_file.load(text, file)
        if config.keys() & names:
            found[flag] = json.dumps({key: config} if key else config)
        else:
            found |= config_file.flags(config)
    return found | flags(given)


def numbers(found: Mapping[str, str], flag: str, path: Sequence[str], least: int = 1) -> list[int] | None:
    """The list of whole numbers at `path` of the JSON in `flag`, as it is written there; None where it is not stated.

    Raises InputError where it is no such list, has a number below 1, or has fewer than `least` of them.
    """
    value = within(flag, found[flag], path) if flag in found else None
    return None if value is None else line.whole_numbers(value, ".".join((flag, *path)), least)


def ascending(name: str, values: Sequence[int]) -> None:
    """Raise InputError where `values` do not ascend, or one is there twice."""
    for before, after in pairwise(values):
        if after <= before:
            raise InputError(f"{name}: {after} follows {before}; write each number once, in ascending order")
