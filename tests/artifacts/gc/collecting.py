"""A small store to be trimmed: numbered entries with a blob each, used an hour apart."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from llmc.artifacts.bundle.reader import BundleFiles
from llmc.artifacts.bundle.stored import add_bundle, checkout
from llmc.artifacts.bundle.writer import write_bundle
from llmc.artifacts.key import Key
from llmc.artifacts.store.layout import Layout
from llmc.artifacts.store.store import Store
from tests.artifacts.helpers import manifest, sources

DAY = 24 * 3600.0
SIZE = 10_000


def key(number: int) -> Key:
    return Key("k", {"number": number})


def content(number: int) -> bytes:
    return number.to_bytes(4, "big") * (SIZE // 4)


def fill(layout: Layout, *numbers: int, shared: bytes | None = None) -> None:
    """Entries used an hour apart, the first one longest ago, by a process that has ended."""
    store = Store(layout.root)
    for number in numbers:
        outputs = {"own": store.put_bytes(content(number))}
        if shared is not None:
            outputs["shared"] = store.put_bytes(shared)
        store.publish(key(number), outputs)
    now = time.time()
    for index, number in enumerate(numbers):
        use(layout, number, now - DAY - 3600.0 * (len(numbers) - index))


def use(layout: Layout, number: int, moment: float) -> None:
    os.utime(layout.entry("k", key(number).hex), (moment, moment))


def age_blobs(layout: Layout, seconds: float = DAY) -> None:
    for _, item in layout.all_blobs():
        os.utime(item.path, (time.time() - seconds,) * 2)


def kept(layout: Layout) -> list[int]:
    """The numbers of the entries that are there, with all of their blobs; nothing else may be there."""
    store = Store(layout.root)
    entries = store.entries("k")
    for entry in entries:
        for blob in entry.outputs.values():
            assert layout.blob(blob.digest).stat().st_size == blob.size
    return sorted(int(entry.key.components["number"] or 0) for entry in entries)


def own_size(layout: Layout) -> int:
    return layout.entry("k", key(1).hex).stat().st_size + SIZE


def add(layout: Layout, tmp_path: Path) -> Path:
    """A bundle in the store, as an entry and as a folder, made a day ago."""
    store = Store(layout.root)
    folder = shutil.copytree(bundle(tmp_path), tmp_path / "copy", dirs_exist_ok=True)
    entry = add_bundle(store, BundleFiles.open(folder))
    built = checkout(store, entry)
    for name in ("bundle", "copy", "model"):
        shutil.rmtree(tmp_path / name)
    for path in (built, layout.entry("bundle", entry.key.hex)):
        os.utime(path, (time.time() - DAY,) * 2)
    return built


def bundle(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "bundle", manifest(), sources(tmp_path / "model"))
