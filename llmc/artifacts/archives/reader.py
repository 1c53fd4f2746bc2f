"""Import: an archive, which may come from anywhere, into a store.

The manifest or the entries come first, so every blob and its size are known before a byte of it is written. Blobs are
written straight into the store, and are published only if their content matches their name. Entries are published when
all blobs are there. After a failure before that point, no entry of the archive is in the store; intact blobs may stay
as garbage, for `llmc cache gc`.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from llmc.artifacts.archives.format import (
    BLOB_FOLDER,
    ENTRY_FOLDER,
    MAX_ENTRY_BYTES,
    Member,
    blob_digest,
    entry_name,
)
from llmc.artifacts.archives.stream import Members, Progress, open_members
from llmc.artifacts.bundle.manifest import Manifest
from llmc.artifacts.bundle.manifest_schema import CHECKSUM_NAME, FILE_NAME, SIGNATURE_NAME, checksum_line
from llmc.artifacts.bundle.manifest_schema import MAX_BYTES as MAX_MANIFEST
from llmc.artifacts.bundle.native import code_of_bundle, code_of_entry
from llmc.artifacts.bundle.reader import MAX_SIGNATURE_BYTES
from llmc.artifacts.bundle.stored import KIND, publish_arrived, read_bundle
from llmc.artifacts.bundle.trust import Admission, Trust, UntrustedError
from llmc.artifacts.digest import PREFIX, Blob, digest_bytes
from llmc.artifacts.key import Key
from llmc.artifacts.store import leases
from llmc.artifacts.store.blobs import BlobMissingError
from llmc.artifacts.store.entries import MAX_BYTES as MAX_ENTRY
from llmc.artifacts.store.entries import Entries, Entry, decode_entry, entry_body
from llmc.artifacts.store.publish_lock import publish_lock
from llmc.artifacts.store.store import Store
from llmc.errors import CapacityError


class Imported(NamedTuple):
    """What an archive held: entries as they are in the store now, how many of them were new, blobs that were read, how
    many of those were new, bytes of each, and seconds that it took."""

    entries: list[Entry]
    new_entries: int
    blobs: int
    bytes: int
    new_blobs: int
    new_bytes: int
    seconds: float


class Guard:
    """What has to be signed in an archive that a person named.

    A signature in the archive must be valid, and native code needs one. With `required`, portable code needs one too,
    and it must be by a key that `trust` knows. Raises UntrustedError.
    """

    def __init__(self, trust: Trust, required: bool) -> None:
        self._trust = trust
        self._required = required

    def check(self, content: bytes, signature: bytes | None, *, native: bool, origin: str) -> Admission:
        """How `content` comes in."""
        admission = Admission(self._trust, content, signature, native=native and not self._required, origin=origin)
        if self._required and admission.signer is None:
            found = "not signed" if signature is None else "signed by a key that is not trusted here"
            raise UntrustedError(
                f"{origin}: {found}, and a signature is required; nothing was imported: have it signed with "
                "`llmc cache sign`, and trust the key of whom you expect with `llmc cache trust KEY.pub`"
            )
        return admission


class _Head(NamedTuple):
    """The part of an archive before its blobs: a bundle or entries. `admissions` say how each comes in, except for
    bundles among several entries, whose manifests are blobs."""

    manifest: Manifest | None
    signature: bytes | None
    admissions: dict[Key | None, Admission]
    entries: list[Entry]
    next: Member | None

    def blobs(self, members: Members) -> dict[str, int]:
        """Every blob that is named, in the order of the archive, and its size."""
        found: dict[str, int] = dict(self.manifest.blobs) if self.manifest is not None else {}
        for entry in self.entries:
            for digest, size in entry.outputs.values():
                if found.setdefault(digest, size) != size:
                    members.fail(f"its entries disagree on the size of {digest}")
        return dict(sorted(found.items()))


def import_archive(
    store: Store, source: Path | BinaryIO, *, trust: Trust, required: bool = False, progress: Progress | None = None
) -> Imported:
    """Put everything in an archive into the store; entries that the store already has are not changed.

    `required` asks for a trusted signature over every bundle and entry. `progress` counts bytes of the file. Raises
    ArtifactError for what is not an archive, intact to its last byte, UntrustedError for what is not signed as it
    should be, DeviceError where zstd or cryptography is needed and missing, and CapacityError or UnwritableError
    where the store cannot take it.
    """
    began = time.monotonic()
    guard = Guard(trust, required)
    with open_members(source, progress) as members:
        head = _read_head(members, guard)
        wanted = head.blobs(members)
        _require_room(store, members, wanted)
        store.hold(*map(leases.blob_name, wanted))
        new_blobs, new_bytes = _read_blobs(store, members, head.next, wanted)
        if head.manifest is not None:
            vouched = _examined(store, head.manifest, head.admissions[None])
            entries = [publish_arrived(store, head.manifest, head.signature, vouched)]
        else:
            entries = _publish_entries(store, members, guard, head)
    return Imported(
        [entry for entry, _ in entries], sum(new for _, new in entries), len(wanted), sum(wanted.values()), new_blobs,
        new_bytes, time.monotonic() - began,
    )  # fmt: skip


def _read_head(members: Members, guard: Guard) -> _Head:
    member = members.next()
    if member is not None and member.name == FILE_NAME:
        return _read_bundle(members, guard, member)
    entries: list[Entry] = []
    admissions: dict[Key | None, Admission] = {}
    last, size = "", 0
    while member is not None and member.name.startswith(ENTRY_FOLDER):
        if member.name <= last:
            members.fail(f"{member.name!r:.200} is not in order, or there twice")
        last, size = member.name, size + member.size
        if size > MAX_ENTRY_BYTES:
            members.fail(f"its entries take more than {MAX_ENTRY_BYTES} bytes")
        entries.append(entry := _read_entry(members, member))
        if entry.key.kind != KIND:
            origin = f"{members.name}: {entry.key.kind} {entry.key.short}"
            native = code_of_entry(entry.key, entry.meta) is not None
            admissions[entry.key] = guard.check(entry_body(entry), entry.envelope, native=native, origin=origin)
        member = members.next()
    return _Head(None, None, admissions, entries, member)


def _read_bundle(members: Members, guard: Guard, member: Member) -> _Head:
    content = members.content(member, MAX_MANIFEST)
    line = checksum_line(digest_bytes(content))
    member = _expect(members, CHECKSUM_NAME)
    if members.content(member, len(line)) != line:
        members.fail(f"{FILE_NAME} is not what {CHECKSUM_NAME} says")
    manifest = Manifest.from_bytes(content, f"{members.name}: {FILE_NAME}")
    if manifest.to_bytes() != content:
        members.fail(f"{FILE_NAME} is not written as llmc writes it")
    signature = None
    following = members.next()
    if following is not None and following.name == SIGNATURE_NAME:
        signature = members.content(following, MAX_SIGNATURE_BYTES)
        following = members.next()
    native = code_of_bundle(manifest) is not None
    admission = guard.check(content, signature, native=native, origin=members.name)
    return _Head(manifest, signature, {None: admission}, [], following)


def _read_entry(members: Members, member: Member) -> Entry:
    try:
        entry = decode_entry(members.content(member, MAX_ENTRY))
    except ValueError as error:
        members.fail(f"{member.name!r:.200} is not an entry ({error})")
    if entry.key.is_local:
        members.fail(f"{member.name} means something on the machine it was made on only")
    if entry_name(entry.key) != member.name:
        members.fail(f"{member.name!r:.200} is the entry of another key, {entry.key.kind} {entry.key.short}")
    return entry


def _expect(members: Members, name: str) -> Member:
    member = members.next()
    if member is None or member.name != name:
        members.fail(f"{name} is missing, before {'its end' if member is None else repr(member.name)[:200]}")
    return member


def _require_room(store: Store, members: Members, wanted: Mapping[str, int]) -> None:
    """Raise CapacityError when the disk has no room for what the archive announces: a bomb never fills it."""
    import shutil

    needed = sum(size for digest, size in wanted.items() if not store.has(Blob(digest, size)))
    for folder in (store.layout.base, *store.layout.base.parents):
        with suppress(OSError):
            free = shutil.disk_usage(folder).free
            if needed > free:
                raise CapacityError(
                    f"{members.name}: needs {needed} bytes in {store.root}, where {free} are free; nothing was "
                    "imported: free some space, or choose another store with --cache-dir"
                )
            return


def _read_blobs(
    store: Store, members: Members, member: Member | None, wanted: Mapping[str, int]
) -> tuple[int, int]:  # fmt: skip
    """Read all blobs in order; returns how many the store did not have, and their bytes."""
    new_blobs = new_bytes = 0
    for digest, size in wanted.items():
        if member is None or blob_digest(member.name) != digest:
            found = "its end" if member is None else f"{member.name!r:.200}"
            members.fail(f"{BLOB_FOLDER}{digest.removeprefix(PREFIX)} is missing: {found} comes in its place")
        if member.size != size:
            members.fail(f"{member.name} has {member.size} bytes, where {size} are announced")
        if _read_blob(store, members, member, digest):
            new_blobs, new_bytes = new_blobs + 1, new_bytes + size
        member = members.next()
    if member is not None:
        members.fail(f"{member.name!r:.200} is named by nothing in it")
    return new_blobs, new_bytes


def _read_blob(store: Store, members: Members, member: Member, digest: str) -> bool:
    """Read one blob, into the store unless it is there and intact; whether it was not."""
    if store.is_intact(Blob(digest, member.size)):
        hasher = hashlib.sha256()
        for piece in members.pieces(member):
            hasher.update(piece)
        _require_digest(members, member, digest, PREFIX + hasher.hexdigest())
        return False
    with store.writer() as stream:
        for piece in members.pieces(member):
            stream.write(piece)
        _require_digest(members, member, digest, stream.digest)
    return True


def _require_digest(members: Members, member: Member, wanted: str, found: str) -> None:
    if found != wanted:
        members.fail(f"{member.name} is damaged: its content has digest {found}")


def _examined(store: Store, manifest: Manifest, admission: Admission) -> bool:
    """Whether a trusted key signed the bundle, whose blobs are here and may come in."""
    admission.examine(store.path(Blob(*blob), verify=False) for blob in manifest.blobs.items())
    return admission.signer is not None


def _publish_entries(store: Store, members: Members, guard: Guard, head: _Head) -> list[tuple[Entry, bool]]:
    for entry in head.entries:
        if entry.key in head.admissions:
            head.admissions[entry.key].examine(store.path(blob, verify=False) for blob in entry.outputs.values())
    listed = [entry for entry in head.entries if entry.key.kind == KIND]
    bundles = {entry.key: _read_listed(store, members, guard, entry) for entry in listed}
    published = []
    for entry in head.entries:
        if entry.key in bundles:
            published.append(publish_arrived(store, *bundles[entry.key]))
        elif (there := store.lookup(entry.key)) is not None:
            published.append((there, False))
        else:
            published.append((_adopt(store, members, entry), True))
    return published


def _adopt(store: Store, members: Members, entry: Entry) -> Entry:
    with publish_lock(store.layout):
        if not all(store.has(blob) for blob in entry.outputs.values()):
            raise BlobMissingError(
                f"{members.name}: blobs of {entry.key.kind} {entry.key.short} were removed from {store.root} as they "
                "came; import it again"
            )
        return Entries(store.layout).adopt(entry)


def _read_listed(store: Store, members: Members, guard: Guard, entry: Entry) -> tuple[Manifest, bytes | None, bool]:
    """A bundle among several, whose manifest and signature are blobs by now."""
    origin = f"{members.name}: bundle {entry.key.short}"
    manifest, signature = read_bundle(store, entry)
    content = store.get_bytes(entry.outputs[FILE_NAME].digest)
    native = code_of_bundle(manifest) is not None
    admission = guard.check(content, signature, native=native, origin=origin)
    return manifest, signature, _examined(store, manifest, admission)
