"""Why something was built again: a key against what is stored, and two manifests as two keys."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmc.artifacts.digest import digest_bytes
from llmc.artifacts.key import Key, Value, canonical_json, tell
from llmc.artifacts.store.layout import SCHEMA, Layout, scan

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest import Manifest
    from llmc.artifacts.store.workspace import Area

LONGEST_LIST = 200
_VERSION = re.compile(r"v(0|[1-9][0-9]{0,5})")


def miss_reason(key: Key, areas: Sequence[Area]) -> str:
    """Why no area has `key`, the first being the store itself, in one line for people.

    That is what was wrong with its entry, if it was put aside just now; else what differs from the nearest entry of
    its kind; else that there is none, and whether the store is new or another version of llmc wrote it.
    """
    for area in areas:
        if (problem := area.entries.problem(key)) is not None:
            return f"its entry was put aside: {problem}"
    if key.is_local:
        return "not seen on this machine before, or changed since"
    near = [found for area in areas if (found := area.entries.nearest(key)) is not None]
    if near:
        return tell(min(near, key=lambda item: len(item[1]))[1])
    return f"nothing of kind {key.kind} is stored{_newness(areas[0].layout)}"


def _newness(layout: Layout) -> str:
    if layout.entries.is_dir():
        return ""
    others = sorted(item.name for item in scan(layout.root) if _VERSION.fullmatch(item.name))
    if others and layout.base.name not in others:
        return f": {layout.root} holds {', '.join(others)} of other versions of llmc, and this one reads v{SCHEMA}"
    return f": the store {layout.root} is new"


def manifest_components(manifest: Manifest) -> dict[str, Value]:
    """What decides how a bundle behaves, by dotted name; not how it came to be or was verified.

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
