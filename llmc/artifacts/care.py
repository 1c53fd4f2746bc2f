"""Looking after a store: verify everything, count everything, sweep what crashed processes left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from llmc.artifacts.digest import PREFIX
from llmc.artifacts.layout import Layout, scan
from llmc.artifacts.publish import discard
from llmc.artifacts.workspace import Area

STALE_SECONDS = 3 * 24 * 3600


class Bad(NamedTuple):
    """Something damaged: the digest of a blob or the kind and key of an entry, and what is wrong."""

    name: str
    reason: str


class Report(NamedTuple):
    """What was read (blobs, their bytes, entries), and what of it was put into quarantine."""

    blobs: int
    bytes: int
    entries: int
    bad: list[Bad]


class Usage(NamedTuple):
    """Files and bytes in a store; `other_bytes` are quarantine and temporaries."""

    blobs: int
    blob_bytes: int
    entries: int
    entry_bytes: int
    other_bytes: int


def verify(area: Area, progress: Callable[[str, int], None] | None = None) -> Report:
    """See `Store.verify`."""
    bad: list[Bad] = []
    blobs = total = entries = 0
    for digest, item in list(area.layout.all_blobs()):
        with suppress(FileNotFoundError):
            size = item.stat().st_size
            blobs, total = blobs + 1, total + size
            if problem := area.blobs.reread(digest):
                bad.append(Bad(digest, problem))
            if progress is not None:
                progress(digest, size)
    for kind, item in list(area.layout.all_entries()):
        entries += 1
        entry = area.entries.load(Path(item.path), PREFIX + Path(item.path).stem)
        if entry is None:
            bad.append(Bad(f"{kind}/{item.name[:12]}", "not a sound entry"))
            continue
        lost = [name for name, blob in entry.outputs.items() if not area.blobs.find(*blob, verify=False)]
        if lost:
            reason = f"missing or damaged: {', '.join(lost)}"
            area.entries.reject(entry.key, reason)
            bad.append(Bad(f"{kind}/{entry.key.short}", reason))
    sweep(area.layout)
    return Report(blobs, total, entries, bad)


def sweep(layout: Layout, older_than: float = STALE_SECONDS) -> None:
    """Remove temporaries that nobody has touched for `older_than` seconds."""
    import shutil

    deadline = time.time() - older_than
    for item in scan(layout.temporaries):
        with suppress(OSError):
            if item.stat(follow_symlinks=False).st_mtime > deadline:
                continue
            if item.is_dir(follow_symlinks=False):
                shutil.rmtree(item.path, ignore_errors=True)
            else:
                discard(Path(item.path))


def usage(layout: Layout) -> Usage:
    """See `Store.usage`."""
    blobs = _sizes(Path(item.path) for _, item in layout.all_blobs())
    entries = _sizes(Path(item.path) for _, item in layout.all_entries())
    other = _sizes(path for folder in (layout.quarantine, layout.temporaries) for path in folder.rglob("*"))
    return Usage(len(blobs), sum(blobs), len(entries), sum(entries), sum(other))


def _sizes(paths: Iterable[Path]) -> list[int]:
    sizes = []
    for path in paths:
        with suppress(OSError):
            sizes.append(path.stat().st_size)
    return sizes
