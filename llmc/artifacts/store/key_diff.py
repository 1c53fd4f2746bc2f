"""Why something was built again: a key against what is stored."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmc.artifacts.key import Key, tell
from llmc.artifacts.store.layout import SCHEMA, Layout, scan

if TYPE_CHECKING:
    from llmc.artifacts.store.workspace import Area

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
