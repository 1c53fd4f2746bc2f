"""`llmc cache gc|rm|pin|unpin`: limit the store's size, remove entries, and exempt entries from that."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from llmc.buckets.render.text import counted, size_text
from llmc.cli.cache.common import (
    age_text,
    bundle_folder,
    is_bundle,
    open_cache,
    print_json,
)
from llmc.cli.options import Command, argument, duration, flag, size, store_flag, switch
from llmc.cli.output import ReadingProgress, close_bars, echo, print_table
from llmc.errors import ArtifactError, InputError

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest import Manifest
    from llmc.artifacts.gc import Collection
    from llmc.artifacts.key import Key
    from llmc.artifacts.store.leases import Pin
    from llmc.artifacts.store.store import Store

FAILURES_SHOWN = 5
_things = partial(
    argument, "[KEY | BUNDLE]...", "Keys or their first digits; bundles: folder, archive, oci://….", default=None
)


@dataclass(frozen=True, kw_only=True)
class CacheCollectCommand(Command):
    """Free disk space in the store: remove leftovers of crashed processes, unreferenced data, and entries over the
    limits.

    Without limits only leftovers and unreferenced data are removed. Pinned entries, and those that a running process
    uses, stay. Other processes may use the store meanwhile.

    \b
    Example:
      llmc cache gc
      llmc cache gc --max-size 20G --max-age 30d
      llmc cache gc --max-size 0 --dry-run --json
    """

    max_size: str | None = flag(None, "SIZE", "Remove least recently used entries until the store has this size: 20G.")
    max_age: str | None = flag(None, "TIME", "Remove entries unused for this long: 30d.")
    dry_run: bool = switch("--dry-run", "Print what would be removed, then stop.")
    cache_dir: Path | None = store_flag()
    as_json: bool = switch("--json", "Print JSON.")

    def run(self) -> None:
        from llmc.artifacts.gc import collect
        from llmc.artifacts.temporaries import sweep

        limit, age = size("--max-size", self.max_size), duration("--max-age", self.max_age)
        layout = open_cache(self.cache_dir).layout
        bar = ReadingProgress("removing", "finishing")
        found = collect(layout, max_size=limit, max_age=age, dry_run=self.dry_run, progress=bar)
        close_bars()
        left = sweep(dry_run=self.dry_run)
        if self.as_json:
            print_json({"root": str(layout.root), **found._asdict(), "temporaries": left._asdict()})
            return
        for line in summary(found, layout.root):
            echo(line)
        if left.folders:
            folders = counted(left.folders, "temporary folder")
            done = "would remove" if self.dry_run else "removed"
            echo(f"{done} {folders} of killed processes, {size_text(left.freed)}")


@dataclass(frozen=True, kw_only=True)
class CacheRemoveCommand(Command):
    """Remove results or bundles from the store, with the data that nothing else in the store needs.

    Bundle folders outside the store stay. Pinned entries, and those that a running process uses, are not removed.

    \b
    Example:
      llmc cache rm 3fa9c2
      llmc cache rm ./smollm2-cpu --dry-run
    """

    what: list[str] | None = _things()
    dry_run: bool = switch("--dry-run", "Print what would be removed, then stop.")
    cache_dir: Path | None = store_flag()
    as_json: bool = switch("--json", "Print JSON.")

    def run(self) -> None:
        from llmc.artifacts.bundle.stored import bundle_key
        from llmc.artifacts.gc import collect
        from llmc.artifacts.store.leases import entry_name

        if not self.what:
            raise InputError("name the KEY or BUNDLE to remove; `llmc cache ls` lists what is stored")
        store = open_cache(self.cache_dir)
        keys = [
            store.find(bundle_key(_manifest(store, text)).digest if is_bundle(text) else text).key for text in self.what
        ]
        found = collect(store.layout, named=frozenset(map(entry_name, keys)), dry_run=self.dry_run)
        if found.kept:
            raise ArtifactError(f"not removed: {_kept(found)}{'; the others were' if found.entries else ''}")
        if self.as_json:
            print_json({"root": str(store.root), **found._asdict()})
            return
        for line in summary(found, store.root):
            echo(line)


def did_something(found: Collection) -> bool:
    """Whether a collection has anything to report."""
    removed = found.entries or found.bundles or found.blobs or found.others
    return bool(removed or found.over or found.failed)


def _kept(found: Collection) -> str:
    return ", ".join(f"{count} {why}" for why, count in sorted(found.kept.items()))


def summary(found: Collection, root: Path) -> list[str]:
    """Describe what a collection did, or would do."""
    counts = [
        counted(count, one, many)
        for count, one, many in (
            (found.entries, "entry", "entries"),
            (found.bundles, "bundle folder", "bundle folders"),
            (found.blobs, "blob", "blobs"),
            (found.others, "remnant", "remnants"),
        )
        if count
    ]
    done = "would remove" if found.dry_run else "removed"
    left = "would be left" if found.dry_run else "left"
    freed = f"{done} {', '.join(counts)}, {size_text(found.freed)}" if counts else "nothing to remove"
    lines = [f"{freed}; {left} in {root}: {size_text(found.after)}"]
    if found.linked:
        lines.append(f"{size_text(found.linked)} of that stays on disk: other links (bundles) still use it")
    if found.waiting:
        lines.append(f"{size_text(found.waiting)} of unreferenced data is too new to remove")
    if found.kept:
        lines.append(f"kept despite the limits: {_kept(found)}")
    if found.over:
        lines.append(f"{size_text(found.over)} over the limit")
    failed = sorted(found.failed.items())
    lines += [f"cannot be removed: {path} ({reason})" for path, reason in failed[:FAILURES_SHOWN]]
    if len(failed) > FAILURES_SHOWN:
        lines.append(f"and {len(failed) - FAILURES_SHOWN} more that cannot be removed")
    return lines


@dataclass(frozen=True, kw_only=True)
class CachePinCommand(Command):
    """Pin stored results or bundles, so that llmc cache gc never removes them; without arguments, list the pins.

    A bundle that is not in the store yet is added to it.

    \b
    Example:
      llmc cache pin ./smollm2-cpu
      llmc cache pin 3fa9c2
      llmc cache pin --json
    """

    what: list[str] | None = _things()
    cache_dir: Path | None = store_flag()
    as_json: bool = switch("--json", "Print JSON.")

    def run(self) -> None:
        from llmc.artifacts.store.leases import pin, pins

        store = open_cache(self.cache_dir)
        for text in self.what or ():
            pin(store.layout, _bundle_in(store, text) if is_bundle(text) else store.find(text).key)
        _print_pins(store, pins(store.layout), self.as_json)


@dataclass(frozen=True, kw_only=True)
class CacheUnpinCommand(Command):
    """Unpin results or bundles, so that llmc cache gc may remove them again.

    \b
    Example:
      llmc cache unpin ./smollm2-cpu
      llmc cache unpin 3fa9c2 --json
    """

    what: list[str] | None = _things()
    cache_dir: Path | None = store_flag()
    as_json: bool = switch("--json", "Print JSON.")

    def run(self) -> None:
        from llmc.artifacts.bundle.stored import bundle_key
        from llmc.artifacts.store.leases import pins, unpin

        if not self.what:
            raise typer.BadParameter("name the KEY or BUNDLE to unpin; `llmc cache pin` lists what is pinned")
        store = open_cache(self.cache_dir)
        known = pins(store.layout)
        chosen = []
        for text in self.what:
            hex_digits = bundle_key(_manifest(store, text)).hex if is_bundle(text) else _digits(text)
            found = [item for item in known if item.hex.startswith(hex_digits)]
            if len(found) != 1:
                number = "is not pinned" if not found else "matches several keys"
                raise ArtifactError(f"{text} {number} in {store.root}; `llmc cache pin` lists what is pinned")
            chosen += found
        for item in chosen:
            unpin(store.layout, item)
        _print_pins(store, pins(store.layout), self.as_json)


def _digits(text: str) -> str:
    from llmc.artifacts.store.store import SHORTEST_PREFIX

    digits = text.removeprefix("sha256:").lower()
    if len(digits) < SHORTEST_PREFIX:
        raise ArtifactError(f"key {text!r} is too short: give {SHORTEST_PREFIX} digits or more")
    return digits


def _manifest(store: Store, text: str) -> Manifest:
    from llmc.artifacts.bundle.manifest import read_manifest

    return read_manifest(bundle_folder(text, store))


def _bundle_in(store: Store, text: str) -> Key:
    from llmc.artifacts.bundle.reader import BundleFiles
    from llmc.artifacts.bundle.stored import add_bundle

    with BundleFiles.open(bundle_folder(text, store)) as files:
        return add_bundle(store, files).key


def _print_pins(store: Store, found: list[Pin], as_json: bool) -> None:
    entries = {(entry.key.kind, entry.key.hex): entry for entry in store.entries()} if found else {}
    if as_json:
        facts: list[dict[str, Any]] = [
            {
                "kind": item.kind,
                "key": f"sha256:{item.hex}",
                "since": item.since,
                "present": (item.kind, item.hex) in entries,
            }
            for item in found
        ]
        print_json({"root": str(store.root), "pins": facts})
        return
    rows = []
    for item in found:
        entry = entries.get((item.kind, item.hex))
        held = "not in the store" if entry is None else size_text(entry.size)
        rows.append((item.kind, item.hex[:12], age_text(item.since), held))
    if rows:
        print_table(("KIND", "KEY", "PINNED", "SIZE"), rows)
    echo(f"{len(found)} pinned in {store.root}")
