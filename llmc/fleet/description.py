"""The file of `llmc plan --fleet`, YAML or JSON, with the schema fleet.schema.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from llmc.errors import InputError
from llmc.files import read_text
from llmc.fleet.simulate import BackOff, Network, Nodes, Peers, RegistryServer
from llmc.platforms import missing
from llmc.strict_json import loads


@dataclass(frozen=True)
class FleetEntry:
    """`replicas` nodes, each with a server of `bundle`, or of `model` compiled for `device`.

    The model's plan is the file `plan`, or made with the arguments `planning` of `plan_for`; `options` are compile
    options by name. `name` is the bundle or model as written.
    """

    name: str
    replicas: int
    bundle: str | None = None
    model: str | None = None
    device: str = "cpu"
    plan: str | None = None
    planning: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Description:
    """A fleet as described in its file; times in seconds. `max_cold_start_s` is None for no bound."""

    models: tuple[FleetEntry, ...]
    network: Network
    max_cold_start_s: float | None = None


def read(path: str) -> Description:
    """Read a fleet description; paths in it are relative to its folder.

    Raises InputError, naming the file, the location and the allowed values; DeviceError without jsonschema.
    """
    import yaml

    try:
        document = loads(json.dumps(yaml.safe_load(read_text(path, "fleet"))))
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise InputError(f"{path}: neither YAML nor JSON: {' '.join(str(error).split())}") from None
    _check(document, path)
    network = Network(
        RegistryServer(**document.get("registry", {})), Nodes(**document.get("nodes", {})),
        BackOff(**document.get("back_off", {})), Peers(**document.get("peers", {})), document.get("seed", 0),
    )  # fmt: skip
    models = [one for at, entry in enumerate(document["models"]) for one in _requested(entry, path, at)]
    return Description(tuple(models), network, document.get("max_cold_start_s"))


def _requested(entry: Mapping[str, Any], path: str, at: int) -> list[FleetEntry]:
    """The entries of `entry`, one for each of its devices."""
    location, given = f"{path}: models[{at}]", dict(entry)
    if ("bundle" in given) == ("model" in given):
        raise InputError(f"{location}: name a bundle, or a model and its device: one of the two")
    more = [name for name in ("device", "plan", "planning", "options") if name in given]
    if "bundle" in given and more:
        raise InputError(f"{location}: a bundle was compiled already; leave out {', '.join(more)}")
    if "plan" in given and "planning" in given:
        raise InputError(f"{location}: plan and planning were both given; give one of them")
    folder, name = Path(path).parent, given.get("bundle") or given["model"]
    for file in ("bundle", "model", "plan"):
        if file in given and (file == "plan" or (folder / given[file]).exists()):
            given[file] = str(folder / given[file])
    devices = given.pop("device", "cpu")
    return [FleetEntry(name, **given, device=one) for one in ([devices] if isinstance(devices, str) else devices)]


def _check(document: object, path: str) -> None:
    try:
        from jsonschema import Draft202012Validator
        from jsonschema.exceptions import best_match
    except ImportError:
        raise missing("jsonschema") from None
    error: Any = best_match(Draft202012Validator(_schema()).iter_errors(document))
    if error is None:
        return
    location = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path).lstrip(".")
    said = error.message if len(error.message) <= 200 else f"{error.message[:200]}…"
    if error.validator == "additionalProperties":
        known = error.schema["properties"]
        name = next(name for name in map(str, error.instance) if name not in known)
        near = get_close_matches(name, known, n=1, cutoff=0.7)
        said = f"unknown key {name!r}; known: {', '.join(known)}" + (f"; did you mean {near[0]!r}?" if near else "")
    raise InputError(f"{path}: {location + ': ' if location else ''}{said}")


@cache
def _schema() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((files("llmc.fleet") / "fleet.schema.json").read_text())
    return found
