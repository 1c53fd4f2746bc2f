"""Pulling: entries that a remote has and a store lacks are verified, checked for trust, and added, blobs first."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from llmc.artifacts.digest import PREFIX
from llmc.artifacts.key import LOCAL, is_kind
from llmc.artifacts.remotes.base import (
    JOBS,
    Meter,
    ObjectError,
    Remote,
    TransferReport,
    entries_prefix,
    entry_name,
)
from llmc.artifacts.remotes.ingest import bring, expect, settle
from llmc.artifacts.remotes.remote_entries import judge, keeps, name_of, read_entry
from llmc.artifacts.remotes.transfers import Mover
from llmc.artifacts.store.entries import Entry
from llmc.artifacts.store.store import SHORTEST_PREFIX, Store
from llmc.artifacts.store.workspace import Area
from llmc.errors import ArtifactError, InputError

if TYPE_CHECKING:
    from llmc.artifacts.bundle.trust import Trust, TrustDecision

_NAME = re.compile(rf"{re.escape(entries_prefix())}/([^/]+)/([0-9a-f]{{64}})\.json")


class _Offer(NamedTuple):
    """An acceptable entry, its trust decision, contents already read, and whether it replaces the store's."""

    entry: Entry
    admission: TrustDecision
    contents: Mapping[str, bytes]
    wanted: bool


def pull(
    store: Store,
    remote: Remote,
    *,
    trust: Trust,
    keys: Iterable[str] | None = None,
    kind: str | None = None,
    jobs: int = JOBS,
    progress: Meter | None = None,
) -> TransferReport:
    """Pull entries (all, those of a kind, or those whose keys begin with `keys`) and their blobs into a store.

    Only blobs that the store and its shared stores lack are moved. Each is verified, and an interrupted download
    resumes (ingest.py). Entries that are damaged or incomplete in the remote, or not trusted, are left out and listed
    in the report, if possible before their blobs are moved. Entries of local kinds are never pulled.
    `remote_entries.keeps` decides whether the store's entry for a key stays.

    Raises InputError for invalid keys, ArtifactError for a key that the remote lacks, RemoteError if the remote fails
    (entries received by then are complete), CapacityError or UnwritableError.
    """
    began = time.monotonic()
    names = find_names(remote, keys, kind)
    area = Area(store.root)
    with Mover(jobs, progress) as mover:
        reading = {name: mover.run(_offer, area, remote, name, trust) for name in names}
        offers = [offer for name, future in reading.items() if (offer := mover.outcome(name_of(name), future))]
        contents = {digest: content for offer in offers for digest, content in offer.contents.items()}
        blobs = {blob for offer in offers for blob in offer.entry.outputs.values()}
        expect(area, [offer.entry for offer in offers])
        lacking = [blob for blob in blobs if not store.has(blob)]
        mover.expect(sum(blob.size for blob in lacking))
        coming = {
            blob: mover.run(bring, area, remote, blob, contents, mover.moved)
            for blob in sorted(lacking, key=lambda blob: -blob.size)
        }
        entries = 0
        for offer in offers:
            name = name_of(entry_name(offer.entry.key))
            futures = [coming[blob] for blob in offer.entry.outputs.values() if blob in coming]
            if all(mover.outcome(name, future) is not None for future in futures) and offer.wanted:
                settling = mover.run(settle, area, offer.entry, offer.admission, store.locate)
                entries += mover.outcome(name, settling) is not None
    came = [blob for blob, future in coming.items() if future.exception() is None]
    there = blobs - set(lacking)
    return TransferReport(
        entries=entries,
        blobs=len(came),
        bytes=sum(future.result() for future in coming.values() if future.exception() is None),
        skipped_blobs=len(there),
        skipped_bytes=sum(blob.size for blob in there),
        seconds=time.monotonic() - began,
        refused=tuple(mover.refused),
    )


def find_names(remote: Remote, keys: Iterable[str] | None = None, kind: str | None = None) -> list[str]:
    """Return the names of a remote's entries, sorted, except those of local kinds. Raises as `pull` does."""
    if kind is not None and (not is_kind(kind) or kind.startswith(LOCAL)):
        raise InputError(f"{kind!r:.80} is not a kind of entry that can be pulled; `llmc cache ls` shows the kinds")
    matches = [match for name in remote.list(entries_prefix(kind)) if (match := _NAME.fullmatch(name))]
    found = {match[0]: match[2] for match in matches if is_kind(match[1]) and not match[1].startswith(LOCAL)}
    if keys is None:
        return sorted(found)
    chosen = set()
    for key in keys:
        digits = key.removeprefix(PREFIX).lower()
        if len(digits) < SHORTEST_PREFIX:
            raise InputError(f"key {key!r:.80} is too short: give {SHORTEST_PREFIX} digits or more")
        hits = [name for name, digest in found.items() if digest.startswith(digits)]
        if not hits:
            raise ArtifactError(f"{remote.url}: no entry with key {key:.80}; push it there, or pull without a key")
        if len(hits) > 1:
            shown = ", ".join(map(name_of, sorted(hits)[:8]))
            raise ArtifactError(f"{remote.url}: key {key:.80} is ambiguous: {shown}; give more digits")
        chosen.add(hits[0])
    return sorted(chosen)


def _offer(area: Area, remote: Remote, name: str, trust: Trust) -> _Offer:
    entry = read_entry(remote, name)
    if entry is None:
        raise ObjectError(f"{remote.url}: {name} is gone; try again")
    entry = entry._replace(used=time.time())
    return _Offer(entry, *judge(remote, entry, trust), not keeps(area.entries.read(entry.key), entry))
