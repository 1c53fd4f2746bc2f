"""Command lines and configuration files of servers: limits as flags, lists in JSON flags, and JSON or YAML files."""

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
    """Return the limits of a server with vLLM's least defaults, max_num_seqs 256 and max_num_batched_tokens 2048.

    `more` overrides these defaults.
    """
    given = {"max_num_seqs": 256, **more, **given}
    return Limits(**{"max_num_batched_tokens": max(2048, given["max_num_seqs"]), **given})


WITHOUT_MODEL = ("ngram", "ngram_gpu", "suffix", "mtp", "extract_hidden_states")
"""Methods of vLLM's speculative decoding that need no model of their own."""


def limit_flags(limits: Limits, names: Mapping[str, str] = LIMITS) -> list[str]:
    """Return the limits as flags with their values; `names` replaces vLLM's flags."""
    return [f"{flag} {getattr(limits, name)}" for flag, name in names.items()]


def json_flag(flag: str, value: Mapping[str, object]) -> str:
    """Return a flag whose value is a JSON object."""
    return f"{flag} {json.dumps(value)}"


def drafts_flag(setup: Setup) -> list[str]:
    """Return --speculative-config, or nothing where the draft model is unknown, since vLLM refuses such a flag
    (vllm/config/speculative.py).
    """
    stated = {one.path[0]: setup.own[one.name] for one in SPECULATIVE if setup.own[one.name]}
    known = "model" in stated or stated.get("method") in WITHOUT_MODEL
    return [json_flag(SPECULATION, stated)] if known else []


def vllm_export(
    arguments: Sequence[str], environment: Mapping[str, str] | None = None, files: Mapping[str, str] | None = None
) -> Export:
    """Return `arguments` as an export, with the same flags as a file for --config."""
    return Export(environment or {}, tuple(arguments), {**(files or {}), "config.yaml": config_yaml(arguments)})


def config_yaml(arguments: Sequence[str]) -> str:
    """Return `arguments`, each a flag with or without a value, as a file for vLLM's --config."""
    lines = []
    for argument in arguments:
        name, _, value = argument.removeprefix("--").partition(" ")
        lines.append(f"{name}: " + (f"'{value}'" if value.startswith("{") else value or "true") + "\n")
    return "".join(lines)


def flags(given: Export) -> dict[str, str]:
    """Return the flags of `given` with their values, "" for a switch.

    The command line takes precedence over YAML files, whose keys stand for flags as in a file for --config. Raises
    InputError, naming the file, for an invalid one.
    """
    found: dict[str, str] = {}
    for name, text in given.files.items():
        if name.endswith((".yaml", ".yml")):
            found |= config_flags(load_config(text, name))
    return found | flags_of([word for argument in given.arguments for word in _words(argument)])


def _words(argument: str) -> list[str]:
    name, _, value = argument.partition(" ")
    return [argument] if "=" in name or not value else [name, value]


def agree(found: Mapping[str, str], limits: Limits, names: Mapping[str, str] = LIMITS) -> None:
    """Raise InputError where one of the flags `found` disagrees with `limits`; `names` maps flags to limits."""
    for spelled, name in names.items():
        flag, expected = spelled.replace("_", "-"), getattr(limits, name)
        if flag in found and found[flag] != str(expected):
            raise InputError(
                f"{flag} {found[flag]} disagrees with {name} {expected}; plan and run the server with the same limits"
            )


def stated(given: Export, flag: str, names: Collection[str], key: str = "") -> dict[str, str]:
    """Return the flags of `given`, including those of its files for --config; the command line takes precedence.

    A file with one of `names` is the value of `flag`, a JSON flag, or the value at its `key`. Raises InputError for
    files that are not mappings.
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
    """Return the list of whole numbers at `path` of the JSON in `flag`, in its order; None where it is absent.

    Raises InputError where it is not such a list, has a number below 1, or has fewer than `least` of them.
    """
    value = within(flag, found[flag], path) if flag in found else None
    return None if value is None else line.whole_numbers(value, ".".join((flag, *path)), least)


def ascending(name: str, values: Sequence[int]) -> None:
    """Raise InputError where `values` are not strictly ascending."""
    for before, after in pairwise(values):
        if after <= before:
            raise InputError(f"{name}: {after} follows {before}; write each number once, in ascending order")


def load_config(text: str, source: str) -> dict[str, object]:
    """Return the mapping in a configuration file; `source` names it in messages.

    Raises InputError for other text, for YAML with aliases, which can expand without bound, and for YAML where PyYAML
    is not installed.
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
    """Return the flags that a file for --config stands for, in the form of `settings.flags_of`."""
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
