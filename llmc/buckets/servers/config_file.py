"""Configuration files of servers: JSON, or YAML, of which JSON is a part."""

from __future__ import annotations

import json
from collections.abc import Mapping

from llmc.errors import InputError


def load(text: str, source: str) -> dict[str, object]:
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


def flags(config: Mapping[str, object]) -> dict[str, str]:
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
