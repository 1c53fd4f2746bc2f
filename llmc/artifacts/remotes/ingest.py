"""Putting results of a remote into a store: blobs, then the entry that names them, protected from collection."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.artifacts.digest import Blob
from llmc.artifacts.remotes.base import Progress, Remote
from llmc.artifacts.remotes.partial import fetch_blob
from llmc.artifacts.store import leases
from llmc.artifacts.store.blobs import BlobMissingError
from llmc.artifacts.store.entries import Entry
from llmc.artifacts.store.publish_lock import publish_lock
from llmc.artifacts.store.workspace import Area

if TYPE_CHECKING:
    from llmc.artifacts.bundle.trust import TrustDecision


def expect(area: Area, entries: Iterable[Entry]) -> None:
    """Keep what is to arrive from being collected, as long as `area` lives."""
    for entry in entries:
        names = [leases.blob_name(blob.digest) for blob in entry.outputs.values()]
        area.lease.hold(leases.entry_name(entry.key), *names)


def bring(area: Area, remote: Remote, blob: Blob, contents: Mapping[str, bytes], progress: Progress) -> int:
    """Put a blob into a store, from contents that were read already, or from the remote; the bytes that were moved.

    Raises as `fetch_blob`.
    """
    content = contents.get(blob.digest)
    if content is None:
        return fetch_blob(remote, area, blob, progress)
    area.blobs.put_bytes(content)
    progress(blob.size)
    return blob.size


def settle(area: Area, entry: Entry, admission: TrustDecision, find: Callable[[Blob], Path | None]) -> Entry:
    """Publish an entry that arrived, if all of its blobs are there, and none is code that may not come in.

    Raises BlobMissingError when one was removed meanwhile, UntrustedError, CapacityError or UnwritableError.
    """
    files = {name: find(blob) for name, blob in entry.outputs.items()}
    admission.examine(path for path in files.values() if path is not None)
    with publish_lock(area.layout):
        for name, blob in entry.outputs.items():
            if find(blob) is None:
                raise BlobMissingError(f"output {name!r} of {entry.key.kind} {entry.key.short} was removed; try again")
        return area.entries.adopt(entry)
