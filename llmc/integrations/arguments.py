"""Command lines and configuration files of servers: limits as flags, lists in JSON flags, and files in JSON or YAML."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

from llmc.buckets.limits import Limits
from llmc.errors import InputError
from llmc.integrations import line
from llmc.integrations.base import LIMITS, Export, Setup
from llmc.integrations.settings import SPECULATION, SPECULATIVE, flags_of, within

BLOCK_LIMITS = {**LIMITS, "--block-size": "block_size"}


def vllm_limits(given: Mapping[str, int], **more: int) -> Limits:
    """The limits of a server with vLLM's least defaults, max_num_seqs 256 and max_num_batched_tokens 2048, and `more`
    of its own."""
    given = {"max_num_seqs": 256, **more, **given}
    return Limits(**{"max_num_batched_tokens": max(2048, given["max_num_seqs"]), **given})


WITHOUT_MODEL = ("ngram", "ngram_gpu", "suffix", "mtp", "extract_hidden_states")
"""Methods of vLLM's speculative decoding that need no model of their own."""


def limit_flags(limits: Limits, names: Mapping[str, str] = LIMITS) -> list[str]:
    """The limits as flags, vLLM's unless `names` has others, each with its value."""
    return [f"{flag} {getattr(limits, name)}" for flag, name in names.items()]


def json_flag(flag: str, value: Mapping[str, object]) -> str:
    """A flag whose value is a JSON object."""
    return f"{flag} {json.dumps(value)}"


def drafts_flag(setup: Setup) -> list[str]:
    """--speculative-config, or nothing where the model that makes drafts is not known: vLLM refuses such a flag
    (vllm/config/speculative.py)."""
    stated = {one.path[0]: setup.own[one.name] for one in SPECULATIVE if setup.own[one.name]}
    known = "model" in stated or stated.get("method") in WITHOUT_MODEL
    return [json_flag(SPECULATION, stated)] if known else []


def vllm_export(
    arguments: Sequence[str], environment: Mapping[str, str] | None = None, files: Mapping[str, str] | None = None
) -> Export:
    """`arguments`, and the same as a file for --config."""
    return Export(environment or {}, tuple(arguments), {**(files or {}), "config.yaml": config_yaml(arguments)})


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
            found |= config_flags(load_config(text, name))
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
        config = load_config(text, file)
        if config.keys() & names:
            found[flag] = json.dumps({key: config} if key else config)
        else:
            found |= config_flags(config)
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


def load_config(text: str, source: str) -> dict[str, object]:
    """The mapping that a configuration file holds; `source` names it in messages.

    Raises InputError for text that is no such mapping, for YAML with aliases, which can be small and unfold to
    anything, and for YAML where PyYAML is not installed.
    """
    try:
        found: object = json.loads(text)
    except RecursionError:
        raise InputError(f"{source}: nested too deep to be a server's configuration") from None
    except ValueError:
        found = _yaml(text, source)
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise InputError(f"{source}: a server's configuration is a mapping of names to values")
    return found


def config_flags(config: Mapping[str, object]) -> dict[str, str]:
    """The flags that a file given with --config stands for, as `settings.flags_of` has them."""
    found = {}
    for key, value in config.items():
        if value is not None:
            found[f"--{key.replace('_', '-')}"] = _text(value)
    return found


def _text(value: object) -> str:
    if value is True:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, (int, str)) for item in value):
        return " ".join(map(str, value))
    return json.dumps(value)


def _yaml(text: str, source: str) -> object:
    import yaml

    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
            raise InputError(f"{source}: YAML aliases (*name) are not read; write the value out")
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"{source}: not valid YAML: {' '.join(str(error).split())[:200]}") from None
