"""Pushing to and pulling from a remote: only what is missing is moved, blobs before the entries that name them."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import NamedTuple, Protocol

from llmc.artifacts.bundle.manifest import SIGNATURE_NAME
from llmc.artifacts.bundle.reader import MAX_SIGNATURE_BYTES
from llmc.artifacts.bundle.stored import KIND, bundle_outputs, read_bundle
from llmc.artifacts.bundle.trust import Trust, TrustDecision, UntrustedError
from llmc.artifacts.digest import PREFIX, Blob, digest_bytes
from llmc.artifacts.key import LOCAL, is_kind
from llmc.artifacts.remotes.base import (
    JOBS,
    Meter,
    ObjectError,
    Progress,
    Remote,
    TransferReport,
    blob_name,
    entries_prefix,
    entry_name,
)
from llmc.artifacts.remotes.ingest import bring, expect, judge, keeps, name_of, read_blob, read_entry, settle
from llmc.artifacts.remotes.mover import Mover
from llmc.artifacts.store.entries import Entry, encode_entry, entry_body
from llmc.artifacts.store.store import SHORTEST_PREFIX, Store
from llmc.artifacts.store.workspace import Area
from llmc.errors import ArtifactError, InputError


class Signs(Protocol):
    """Signs content (signing/signer.py)."""

    def sign(self, content: bytes, existing: bytes | None = None) -> bytes:
        """Return the content of a signature file; signatures of other keys in `existing` stay."""


class _Plan(NamedTuple):
    """An entry as it should be in the remote, contents created for it, and whether the remote's own entry stays."""

    entry: Entry
    contents: Mapping[str, bytes]
    keep: bool


def push(
    store: Store,
    entries: Iterable[Entry],
    remote: Remote,
    *,
    jobs: int = JOBS,
    signer: Signs | None = None,
    progress: Meter | None = None,
) -> TransferReport:
    """Push entries and their blobs to a remote, `jobs` at once; existing objects are not sent.

    Entries of local kinds are left out. With a `signer`, the entries are signed, bundles by a signature file; the store
    is unchanged. An entry in the remote stays if it names the same outputs, or if it is signed and the new one is not.
    An entry whose blobs are missing or damaged here is left out and listed in the report. Raises RemoteError if the
    remote fails: entries sent by then are complete.
    """
    began = time.monotonic()
    chosen = {entry.key: entry for entry in entries if not entry.key.is_local}
    with Mover(jobs, progress) as mover:
        preparing = {key: mover.run(_prepare, store, entry, remote, signer) for key, entry in chosen.items()}
        plans = [plan for key, future in preparing.items() if (plan := mover.outcome(name_of(entry_name(key)), future))]
        contents = {digest: content for plan in plans for digest, content in plan.contents.items()}
        blobs = {blob for plan in plans for blob in plan.entry.outputs.values()}
        looking = {blob: mover.run(remote.size, blob_name(blob.digest)) for blob in blobs}
        lacking = [blob for blob, future in looking.items() if mover.outcome(blob.digest, future) != blob.size]
        mover.expect(sum(blob.size for blob in lacking))
        sending = {
            blob: mover.run(_send, store, remote, blob, contents.get(blob.digest), mover.moved)
            for blob in sorted(lacking, key=lambda blob: -blob.size)
        }
        publishing: list[tuple[str, Future[bool]]] = []
        for plan in plans:
            name = entry_name(plan.entry.key)
            if _all_there(mover, plan, sending) and not plan.keep:
                publishing.append((name, mover.run(_publish, remote, name, encode_entry(plan.entry))))
        published = [mover.outcome(name_of(name), future) for name, future in publishing]
    sent = [blob for blob, future in sending.items() if future.exception() is None]
    there = [blob.size for blob in blobs - set(lacking)]
    return TransferReport.of(began, sum(map(bool, published)), [blob.size for blob in sent], there, mover.refused)


def _prepare(store: Store, entry: Entry, remote: Remote, signer: Signs | None) -> _Plan:
    theirs: Entry | None = None
    try:
        theirs = read_entry(remote, entry_name(entry.key))
    except ObjectError:  # damaged there: replaced by ours
        theirs = None
    contents: Mapping[str, bytes] = {}
    if signer is not None:
        sign = _sign_bundle if entry.key.kind == KIND else _sign_entry
        entry, contents = sign(store, entry, remote, theirs, signer)
    return _Plan(entry, contents, keeps(theirs, entry))


def _sign_entry(
    store: Store, entry: Entry, remote: Remote, theirs: Entry | None, signer: Signs
) -> tuple[Entry, dict[str, bytes]]:
    from json import loads

    body = entry_body(entry)
    existing = entry.envelope
    if existing is None and theirs is not None and entry_body(theirs) == body:
        existing = theirs.envelope
    signed = _sign(signer, body, existing)
    return entry._replace(signature=loads(signed)), {}


def _sign_bundle(
    store: Store, entry: Entry, remote: Remote, theirs: Entry | None, signer: Signs
) -> tuple[Entry, dict[str, bytes]]:
    manifest, existing = read_bundle(store, entry)
    if existing is None and theirs is not None and SIGNATURE_NAME in theirs.outputs:
        try:
            existing = read_blob(remote, theirs.outputs[SIGNATURE_NAME], MAX_SIGNATURE_BYTES)
        except ObjectError:
            existing = None
    signed = _sign(signer, manifest.to_bytes(), existing)
    return entry._replace(outputs=bundle_outputs(manifest, signed)), {digest_bytes(signed): signed}


def _sign(signer: Signs, content: bytes, existing: bytes | None) -> bytes:
    """Add a signature to the existing ones; those that do not cover this content are dropped."""
    try:
        return signer.sign(content, existing)
    except UntrustedError:
        return signer.sign(content)


def _send(store: Store, remote: Remote, blob: Blob, content: bytes | None, progress: Progress) -> bool:
    remote.upload(blob_name(blob.digest), store.path(blob) if content is None else content, progress)
    return True


def _publish(remote: Remote, name: str, data: bytes) -> bool:
    remote.upload(name, data, lambda _: None)
    return True


def _all_there(mover: Mover, plan: _Plan, sending: Mapping[Blob, Future[bool]]) -> bool:
    name = name_of(entry_name(plan.entry.key))
    for blob in plan.entry.outputs.values():
        if blob in sending and mover.outcome(name, sending[blob]) is None:
            return False
    return True


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
    came = [future.result() for future in coming.values() if future.exception() is None]
    there = [blob.size for blob in blobs - set(lacking)]
    return TransferReport.of(began, entries, came, there, mover.refused)


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
