"""Pushing: what a remote lacks is sent, blobs before the entries that name them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import NamedTuple, Protocol

from llmc.artifacts.bundle.manifest_schema import SIGNATURE_NAME
from llmc.artifacts.bundle.reader import MAX_SIGNATURE_BYTES
from llmc.artifacts.bundle.stored import KIND, bundle_outputs, read_bundle
from llmc.artifacts.bundle.trust import UntrustedError
from llmc.artifacts.digest import Blob, digest_bytes
from llmc.artifacts.remotes.base import (
    JOBS,
    Meter,
    ObjectError,
    Progress,
    Remote,
    TransferReport,
    blob_name,
    entry_name,
)
from llmc.artifacts.remotes.remote_entries import keeps, name_of, read_blob, read_entry
from llmc.artifacts.remotes.transfers import Mover
from llmc.artifacts.store.entries import Entry, encode_entry, entry_body
from llmc.artifacts.store.store import Store


class Signs(Protocol):
    """Signs content (signing/signer.py)."""

    def sign(self, content: bytes, existing: bytes | None = None) -> bytes:
        """Return the content of a signature file; signatures of other keys in `existing` stay."""
        ...


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
    there = blobs - set(lacking)
    return TransferReport(
        entries=sum(map(bool, published)),
        blobs=len(sent),
        bytes=sum(blob.size for blob in sent),
        skipped_blobs=len(there),
        skipped_bytes=sum(blob.size for blob in there),
        seconds=time.monotonic() - began,
        refused=tuple(mover.refused),
    )


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
    """Whether all blobs of an entry are in the remote, after waiting for those being sent."""
    name = name_of(entry_name(plan.entry.key))
    for blob in plan.entry.outputs.values():
        if blob in sending and mover.outcome(name, sending[blob]) is None:
            return False
    return True
