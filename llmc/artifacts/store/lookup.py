"""Finding an entry and its blobs in several areas while others collect (gc/collect.py), and explaining misses."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from llmc.artifacts.digest import Blob
from llmc.artifacts.key import Key, describe
from llmc.artifacts.store.entries import Entry
from llmc.artifacts.store.layout import SCHEMA, Layout, scan
from llmc.artifacts.store.leases import blob_name, entry_name
from llmc.artifacts.store.workspace import Area

T = TypeVar("T")
_VERSION = re.compile(r"v(0|[1-9][0-9]{0,5})")
PAUSES = (0.01, 0.02, 0.04, 0.08, 0.16)
"""Seconds between attempts to find a missing file: without locks, a collection may put it back a moment later."""


def find_blob(areas: Sequence[Area], digest: str, size: int | None, verify: bool) -> Path | None:
    """Return the file of an intact blob in the first area that has one, or None."""
    return next(filter(None, (area.blobs.find(digest, size, verify=verify) for area in areas)), None)


def claim_blob(areas: Sequence[Area], digest: str, size: int | None, verify: bool) -> Path | None:
    """Return the file of an intact blob, which stays as long as its area's object lives, or None."""
    for area in areas:
        path = area.blobs.find(digest, size, verify=verify)
        if path is not None and area.lease.claim_blob(digest):
            return path
    return None


def insist(areas: Sequence[Area], digest: str, find: Callable[[], T | None]) -> T | None:
    """Call `find` for a blob; retry for one that was claimed before and did not turn out damaged."""
    for pause in (*PAUSES, None):
        damaged = _damaged(areas)
        if (found := find()) is not None:
            return found
        if pause is None or _damaged(areas) != damaged or not any(area.lease.holds_blob(digest) for area in areas):
            return None
        time.sleep(pause)
    return None


def lost_output(outputs: Mapping[str, Blob], areas: Sequence[Area], verify: bool) -> str | None:
    """Return the name of the first output whose blob is missing or damaged, or None."""
    lost = (name for name, (digest, size) in outputs.items() if find_blob(areas, digest, size, verify) is None)
    return next(lost, None)


def find_entry(areas: Sequence[Area], key: Key, verify: bool) -> Entry | None:
    """Return the entry of a key from the first area that has it with all of its blobs, marked as used.

    An entry with a missing blob is quarantined, unless it was collected or published again meanwhile. It also stays if
    a blob could not be read, because that may be temporary.
    """
    for area in areas:
        if key.is_local and area.layout.read_only:
            continue  # it may come from another machine
        if (entry := _find_in(area, areas, key, verify)) is not None:
            return entry
    return None


def _find_in(area: Area, areas: Sequence[Area], key: Key, verify: bool) -> Entry | None:
    for pause in (*PAUSES, None):
        entry = area.entries.read(key)
        if entry is None:
            return None
        damaged, unreadable = _damaged(areas), _unreadable(areas)
        lost = lost_output(entry.outputs, areas, verify)
        if lost is None:
            if area.lease.claim(names_of(entry.key, entry.outputs), partial(_is_there, area, areas, entry)):
                area.entries.touch(key)
                return entry
        elif _unreadable(areas) != unreadable:
            return None
        elif pause is None or _damaged(areas) != damaged:
            area.entries.reject(entry, f"blob of {lost!r} is missing or damaged")
            return None
        time.sleep(pause or 0)
    return None


def names_of(key: Key, outputs: Mapping[str, Blob]) -> list[str]:
    """Return the lease names of an entry and its outputs. Raises ValueError for an invalid digest."""
    return [entry_name(key), *(blob_name(blob.digest) for blob in outputs.values())]


def miss_reason(key: Key, areas: Sequence[Area]) -> str:
    """Explain in one line why no area has `key`; the first area is the store itself.

    The reason is what was wrong with its entry, if it was quarantined just now; otherwise what differs from the nearest
    entry of its kind; otherwise that there is none, and whether the store is new or another version of llmc wrote it.
    """
    for area in areas:
        if (problem := area.entries.problem(key)) is not None:
            return f"its entry was quarantined: {problem}"
    if key.is_local:
        return "not seen on this machine before, or changed since"
    near = [found for area in areas if (found := area.entries.nearest(key)) is not None]
    if near:
        return describe(min(near, key=lambda item: len(item[1]))[1])
    return f"nothing of kind {key.kind} is stored{_newness(areas[0].layout)}"


def _is_there(area: Area, areas: Sequence[Area], entry: Entry) -> bool:
    path = area.layout.entry(entry.key.kind, entry.key.hex)
    return path.exists() and lost_output(entry.outputs, areas, verify=False) is None


def _damaged(areas: Sequence[Area]) -> int:
    return sum(area.blobs.corrupt for area in areas)


def _unreadable(areas: Sequence[Area]) -> int:
    return sum(area.blobs.unreadable for area in areas)


def _newness(layout: Layout) -> str:
    if layout.entries.is_dir():
        return ""
    others = sorted(item.name for item in scan(layout.root) if _VERSION.fullmatch(item.name))
    if others and layout.base.name not in others:
        return f": {layout.root} holds {', '.join(others)} of other versions of llmc, and this one reads v{SCHEMA}"
    return f": the store {layout.root} is new"
