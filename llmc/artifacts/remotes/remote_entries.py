"""A remote's entries: read, checked and judged before their blobs are moved."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from llmc.artifacts.bundle.manifest import Manifest
from llmc.artifacts.bundle.manifest_schema import FILE_NAME, SIGNATURE_NAME
from llmc.artifacts.bundle.manifest_schema import MAX_BYTES as MAX_MANIFEST_BYTES
from llmc.artifacts.bundle.native import code_of_bundle, code_of_entry
from llmc.artifacts.bundle.reader import MAX_SIGNATURE_BYTES
from llmc.artifacts.bundle.stored import KIND, require_agreement
from llmc.artifacts.bundle.trust import TrustDecision
from llmc.artifacts.digest import Blob, digest_bytes
from llmc.artifacts.remotes.base import ObjectError, Remote, blob_name, entry_name
from llmc.artifacts.store.entries import MAX_BYTES, Entry, decode_entry, entry_body

if TYPE_CHECKING:
    from llmc.artifacts.bundle.trust import Trust


def read_entry(remote: Remote, name: str) -> Entry | None:
    """Return the entry of this name in a remote, or None.

    Raises ObjectError for an entry that is torn, altered, of another schema, or filed under another key's name.
    """
    data = remote.read(name, MAX_BYTES)
    if data is None:
        return None
    try:
        entry = decode_entry(data)
    except ValueError as error:
        raise ObjectError(f"{remote.url}: {name} is not an entry ({error}); push it again") from None
    if entry_name(entry.key) != name:
        raise ObjectError(f"{remote.url}: {name} belongs to {entry.key.kind} {entry.key.short}; delete it there")
    return entry


def judge(remote: Remote, entry: Entry, trust: Trust) -> tuple[TrustDecision, Mapping[str, bytes]]:
    """Decide whether to accept an entry of a remote; return the decision and the contents read for it, by digest.

    A bundle is judged by its manifest and signature file, which are read and must match the entry; anything else by the
    entry's own signature. Raises UntrustedError, ObjectError or ArtifactError.
    """
    origin = f"{remote.url}: {entry.key.kind} {entry.key.short}"
    if entry.key.kind != KIND:
        native = code_of_entry(entry.key, entry.meta) is not None
        return TrustDecision(trust, entry_body(entry), entry.envelope, native=native, origin=origin), {}
    if FILE_NAME not in entry.outputs:
        raise ObjectError(f"{origin} names no {FILE_NAME}; delete it there, or push it again")
    content = read_blob(remote, entry.outputs[FILE_NAME], MAX_MANIFEST_BYTES)
    signed = entry.outputs.get(SIGNATURE_NAME)
    signature = None if signed is None else read_blob(remote, signed, MAX_SIGNATURE_BYTES)
    manifest = Manifest.from_bytes(content, origin)
    require_agreement(entry, manifest, signature, origin)
    admission = TrustDecision(trust, content, signature, native=code_of_bundle(manifest) is not None, origin=origin)
    return admission, {digest_bytes(item): item for item in (content, signature) if item is not None}


def read_blob(remote: Remote, blob: Blob, limit: int) -> bytes:
    """Return a small blob of a remote, verified. Raises ObjectError."""
    name = blob_name(blob.digest)
    if blob.size > limit:
        raise ObjectError(f"{remote.url}: {name} has {blob.size} bytes, more than the limit of {limit}")
    data = remote.read(name, blob.size)
    if data is None:
        raise ObjectError(f"{remote.url}: {name} is missing; push it again")
    if len(data) != blob.size or digest_bytes(data) != blob.digest:
        raise ObjectError(
            f"{remote.url}: {name} is damaged: its content has digest {digest_bytes(data)}; push it again"
        )
    return data


def keeps(there: Entry | None, coming: Entry) -> bool:
    """Whether the existing entry for a key stays when another one arrives.

    It stays if both name the same outputs, or if only the existing entry is signed. Any other signed entry that arrives
    replaces it.
    """
    if there is None:
        return False
    if is_signed(coming):
        return entry_body(there) == entry_body(coming) and there.signature == coming.signature
    return is_signed(there) or dict(there.outputs) == dict(coming.outputs)


def is_signed(entry: Entry) -> bool:
    """Whether an entry, or its bundle, has a signature, by any key."""
    return entry.signature is not None or (entry.key.kind == KIND and SIGNATURE_NAME in entry.outputs)


def name_of(name: str) -> str:
    """Return an entry's name for display: its kind and the first digits of its key."""
    path = PurePosixPath(name)
    return f"{path.parent.name} {path.stem[:12]}"
