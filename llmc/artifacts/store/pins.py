"""Pins: entries that stay regardless of the limits.

    pin = "pins/" kind "-" 64 hex        empty; its name says which entry, its mtime since when

A pin may outlive its entry (damaged, or removed by hand): a result built again under that key is pinned again.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from llmc.artifacts.atomic_write import create_exclusive, make_folder, sync_folder, writing
from llmc.artifacts.key import Key, is_kind
from llmc.artifacts.store.layout import HEX, Layout, scan
from llmc.artifacts.store.leases import name_of_entry
from llmc.artifacts.store.publish_lock import REMEDY, publish_lock
from llmc.errors import ArtifactError


class Pin(NamedTuple):
    """One pinned entry, by kind and 64 hex digits; `since` in seconds since 1970."""

    kind: str
    hex: str
    since: float

    @property
    def name(self) -> str:
        """The lease name of the entry."""
        return name_of_entry(self.kind, self.hex)


def pin(layout: Layout, key: Key) -> None:
    """Pin the entry of a key, durably; an existing pin stays.

    Raises ArtifactError if the entry is not in the store, CapacityError or UnwritableError if the pin cannot be
    written.
    """
    path = layout.pin(key.kind, key.hex)
    with publish_lock(layout), writing(path, 0, REMEDY):
        make_folder(path.parent)
        with suppress(FileExistsError):
            os.close(create_exclusive(path))
        if not layout.entry(key.kind, key.hex).is_file():
            path.unlink(missing_ok=True)
            raise ArtifactError(f"{layout.root}: no entry {key.kind} {key.short} to pin; `llmc cache ls` lists them")
        sync_folder(path.parent)


def unpin(layout: Layout, found: Pin) -> None:
    """Remove a pin. Raises UnwritableError if that fails."""
    path = layout.pin(found.kind, found.hex)
    with writing(path, 0, REMEDY):
        path.unlink(missing_ok=True)
        sync_folder(path.parent)


def pins(layout: Layout) -> list[Pin]:
    """Return every pin, by kind and key."""
    found = []
    for item in scan(layout.pins):
        kind, _, digits = item.name.rpartition("-")
        if is_kind(kind) and HEX.fullmatch(digits):
            with suppress(OSError):
                found.append(Pin(kind, digits, Path(item.path).stat().st_mtime))
    return sorted(found)
