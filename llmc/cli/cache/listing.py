"""`llmc cache ls`: what the store holds, how much of it is whose, and what is kept from being collected."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmc.buckets.warmup.sizes import size_text
from llmc.cli.cache.common import (
    CacheDirFlag,
    JsonFlag,
    age_text,
    open_cache,
    print_json,
    print_table,
    show_value,
)
from llmc.cli.options import option

if TYPE_CHECKING:
    from llmc.artifacts.gc.inventory import Inventory
    from llmc.artifacts.store.audit import Share, Usage
    from llmc.artifacts.store.entries import Entry
    from llmc.artifacts.store.store import Store

SUMMARY_WIDTH = 90
ORDER = {"cache": -3, "model": -2, "version": -1, "toolchain": 1, "isa": 2}
"""Groups of components that come first, and those that most entries have in common."""
TITLES = ("KIND", "KEY", "SIZE", "OWN", "SHARED", "USED", "STATE", "COMPONENTS")


def list_entries(
    kind: Annotated[str | None, option("--kind", "KIND", "Only entries of this kind.")] = None,
    cache_dir: CacheDirFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """List what is stored: kind, key, size, time since it was used, and what it was made from.

    OWN is what goes with the entry, SHARED what other entries name as well. What is pinned or in use is not collected.

    \b
    Example:
      llmc cache ls
      llmc cache ls --kind bundle
      llmc cache ls --kind executable --json
    """
    from llmc.artifacts.store.audit import shares

    store = open_cache(cache_dir)
    everything = store.entries()
    entries = [entry for entry in everything if kind in (None, entry.key.kind)]
    found, census, usage = shares(everything), _census(store), store.usage()
    if as_json:
        print_json(
            {
                "root": str(store.root),
                "usage": usage._asdict() | {"total": usage.total},
                "entries": [_as_json(entry, found[entry.key.digest], census) for entry in entries],
            }
        )
        return
    print_table(TITLES, [_row(entry, found[entry.key.digest], census) for entry in entries])
    typer.echo(f"{len(entries)} entries; {_usage_text(usage, store.root)}")


def entry_json(entry: Entry) -> dict[str, Any]:
    """An entry as JSON."""
    return {
        "kind": entry.key.kind,
        "key": entry.key.digest,
        "size": entry.size,
        "created": entry.created,
        "used": entry.used,
        "components": dict(entry.key.components),
        "outputs": {name: blob._asdict() for name, blob in entry.outputs.items()},
        "meta": dict(entry.meta),
    }


def _census(store: Store) -> Inventory:
    from llmc.artifacts.gc.inventory import Counter
    from llmc.artifacts.store.layout import Layout

    return Counter(Layout(store.root, read_only=True)).take(time.time())


def _state(entry: Entry, census: Inventory) -> tuple[bool, bool, float]:
    """Whether an entry is pinned, whether it is in use, and when it, or a bundle folder of it, was used last."""
    from llmc.artifacts.store.leases import entry_name

    name = entry_name(entry.key)
    item = census.items.get(name)
    if item is None:
        return name in census.pinned, False, entry.used
    return name in census.pinned, not item.names.isdisjoint(census.held), item.used


def _row(entry: Entry, share: Share, census: Inventory) -> tuple[str, ...]:
    pinned, in_use, used = _state(entry, census)
    marks = ", ".join(name for name, holds in (("pinned", pinned), ("in use", in_use)) if holds)
    sizes = (size_text(share.size), size_text(share.own), size_text(share.shared))
    return entry.key.kind, entry.key.short, *sizes, age_text(used), marks, _summary(entry)


def _as_json(entry: Entry, share: Share, census: Inventory) -> dict[str, Any]:
    pinned, in_use, used = _state(entry, census)
    facts = {"size": share.size, "own": share.own, "shared": share.shared}
    return {**entry_json(entry), **facts, "pinned": pinned, "in_use": in_use, "used": used}


def _usage_text(usage: Usage, root: Path) -> str:
    """What is on the disk in all, and how much of it is neither entries nor blobs."""
    others = ((usage.bundle_bytes, "bundle folders alone"), (usage.other_bytes, "quarantine and temporaries"))
    rest = ", ".join(f"{size_text(size)} of it in {what}" for size, what in others if size)
    return f"{usage.blobs} blobs, {size_text(usage.total)} on disk in {root}" + (f"; {rest}" if rest else "")


def _summary(entry: Entry) -> str:
    """What an entry was made from, on one line: the components that are not digests; for a bundle, what it is."""
    from llmc.artifacts.bundle.stored import KIND
    from llmc.artifacts.digest import is_digest

    if entry.key.kind == KIND:
        model, device, count = (entry.meta.get(name, "?") for name in ("model", "device", "executables"))
        text = f"{model or 'a model'} for {device}, {count} executables"
    else:
        items = sorted(entry.key.components.items(), key=lambda item: ORDER.get(item[0].partition(".")[0], 0))
        text = " ".join(f"{name}={show_value(value)}" for name, value in items if not is_digest(value))
    return text if len(text) <= SUMMARY_WIDTH else text[: SUMMARY_WIDTH - 1] + "…"


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("ls")(list_entries)
