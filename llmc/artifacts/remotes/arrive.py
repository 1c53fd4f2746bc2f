"""What arrives in a store from a remote: blobs, and then the entry that names them, safe from being collected."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from llmc.artifacts import leases
from llmc.artifacts.blobs import Blob, BlobMissingError
from llmc.artifacts.entries import Entry
from llmc.artifacts.gate import gate
from llmc.artifacts.remotes.base import Progress, Remote
from llmc.artifacts.remotes.partial import fetch_blob
from llmc.artifacts.workspace import Area


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


def settle(area: Area, entry: Entry, there: Callable[[Blob], bool]) -> Entry:
    """Publish an entry that arrived, if all of its blobs are `there`.

    Raises BlobMissingError when one was removed meanwhile, CapacityError or UnwritableError.
    """
    with gate(area.layout):
        for name, blob in entry.outputs.items():
            if not there(blob):
                raise BlobMissingError(f"output {name!r} of {entry.key.kind} {entry.key.short} was removed; try again")
        return area.entries.adopt(entry)
