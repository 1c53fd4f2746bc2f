"""A manifest as the components of a key, so that two of them are told apart as keys are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmc.artifacts.bundle.manifest import Manifest
from llmc.artifacts.digest import digest_bytes
from llmc.artifacts.key import Value, canonical_json

LONGEST_LIST = 200


def manifest_components(manifest: Manifest) -> dict[str, Value]:
    """The members that decide how a bundle behaves, by dotted name, without its provenance and verification.

    A long list (the buckets of a plan) is given by digest; an executable, named by phase and shape, by key.
    """
    found: dict[str, Value] = {
        "llmc": manifest.llmc,
        "device": manifest.device,
        "target": manifest.target,
        "executor": manifest.executor,
        "isa": " ".join(manifest.isa),
    }
    for name in ("model", "options", "plan", "toolchain"):
        _flatten(name, getattr(manifest, name), found)
    for name, digest in manifest.files.items():
        found[f"files.{name}"] = digest
    for item in manifest.executables:
        found[f"executable[{item}]"] = item.key
        found[f"executable[{item}].state"] = item.state
    return found


def flat_components(members: Mapping[str, Any]) -> dict[str, Value]:
    """Some members of a manifest, named as `manifest_components` names them."""
    found: dict[str, Value] = {}
    for name, value in members.items():
        _flatten(name, value, found)
    return found


def _flatten(name: str, value: Any, found: dict[str, Value]) -> None:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _flatten(f"{name}.{key}", inner, found)
    elif value is None or isinstance(value, str | bool | int):
        found[name] = value
    else:
        text = canonical_json(value)
        found[name] = text.decode() if len(text) <= LONGEST_LIST else digest_bytes(text)
