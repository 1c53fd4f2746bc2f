"""References: texts that can name a bundle in place of its folder.

    reference = folder
              | file ".tar"                                      an archive with one bundle; see oci/archive.py
              | "store:" hex                                     first digits of a bundle's key or manifest digest
              | "oci://" … | "oci-layout:" …                     an image; see oci/reference.py

A folder is used as it is. Everything else is added to the store once, and used as a folder there, whose blobs are links
to the store's. The store notes the content of an archive, or of an image named by digest:

    entry of kind "local-archive" = {path, device, inode, size, mtime_ns, ctime_ns} → meta {"manifest": digest}
    entry of kind "local-image"   = {reference} → meta {"manifest": digest}
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.artifacts.atomic_write import UnwritableError
from llmc.artifacts.bundle.manifest import SIGNATURE_NAME
from llmc.artifacts.bundle.reader import BundleFiles, blob_path
from llmc.artifacts.bundle.stored import KIND, bundle_key, checkout
from llmc.artifacts.digest import PREFIX, Blob, digest_bytes, is_digest
from llmc.artifacts.key import Key, Value
from llmc.artifacts.store.leases import bundle_name, entry_name
from llmc.artifacts.verified_files import settled, signature
from llmc.errors import ArtifactError, CapacityError
from llmc.paths import is_dir

if TYPE_CHECKING:
    from llmc.artifacts.bundle.trust import Trust
    from llmc.artifacts.store.entries import Entry
    from llmc.artifacts.store.store import Store
    from llmc.settings import Settings

STORE = "store:"
IMAGES = ("oci://", "oci-layout:")
ARCHIVE = ".tar"
SHORTEST_PREFIX = 4


def is_reference(text: str) -> bool:
    """Whether a text has the form of a bundle reference rather than a folder name."""
    return text.startswith((STORE, *IMAGES)) or text.endswith(ARCHIVE)


def resolve(text: str | Path, settings: Settings, store: Store | None = None, trust: Trust | None = None) -> Path:
    """Return the folder of the bundle that `text` names; text that is not a reference is taken as a path.

    `store` and `trust` default to the settings'. Raises ArtifactError for a missing or damaged bundle and for an
    archive without exactly one bundle, UntrustedError, InputError for an invalid reference, DeviceError for a missing
    package, and CapacityError or UnwritableError if the store cannot take the bundle.
    """
    name = str(text)
    path = Path(name)
    if not is_reference(name) or is_dir(path):
        return path
    if store is None:
        from llmc.artifacts.local.opening import open_store

        store = open_store(None, settings)
    if name.startswith(STORE):
        return _folder(store, find_bundle(store, name.removeprefix(STORE)))
    if trust is None:
        from llmc.artifacts.signing.keyring import Keyring

        trust = Keyring.from_settings(settings)
    if name.startswith(IMAGES):
        return _folder(store, _image(name, store, trust))
    return _folder(store, _archive(path, store, trust))


def find_bundle(store: Store, prefix: str) -> Entry:
    """Return the bundle whose key or manifest digest starts with `prefix` (with or without "sha256:").

    Raises ArtifactError if there is none or more than one, or for fewer than 4 digits.
    """
    digits = prefix.removeprefix(PREFIX).lower()
    if is_digest(PREFIX + digits) and (entry := store.lookup(Key(KIND, {"manifest": PREFIX + digits}))):
        return entry
    if len(digits) < SHORTEST_PREFIX:
        raise ArtifactError(f"{STORE}{prefix} is too short: give {SHORTEST_PREFIX} digits or more")
    named = [(entry, str(entry.key.components.get("manifest")).removeprefix(PREFIX)) for entry in store.entries(KIND)]
    found = [entry for entry, manifest in named if entry.key.hex.startswith(digits) or manifest.startswith(digits)]
    from llmc.artifacts.store.store import the_one

    return the_one(found, f"bundle {STORE}{prefix}", f"{store.root}; `llmc cache ls --kind bundle` lists them")


def _folder(store: Store, entry: Entry) -> Path:
    """Return the bundle as a folder in the store; an existing one whose blobs are the store's is used as it is.

    Then nothing is hashed; blobs are verified when they are read.
    """
    folder = store.layout.bundles / entry.key.hex
    store.hold(entry_name(entry.key), bundle_name(folder))
    with suppress(ArtifactError, OSError):
        files = BundleFiles.open(folder)
        signed = entry.outputs.get(SIGNATURE_NAME)
        there = files.signature
        same = there is None if signed is None else there is not None and digest_bytes(there) == signed.digest
        if same and bundle_key(files.manifest) == entry.key and _is_linked(store, files):
            os.utime(folder)
            return folder
    return checkout(store, entry)


def _is_linked(store: Store, files: BundleFiles) -> bool:
    pairs = (
        (blob_path(files.folder, digest), store.path(Blob(digest, size), verify=False))
        for digest, size in files.manifest.blobs.items()
    )
    return all(mine.samefile(theirs) for mine, theirs in pairs)


def _archive(path: Path, store: Store, trust: Trust) -> Entry:
    note = _archive_note(path)
    if note is not None and (entry := _noted(store, note)):
        return entry
    from llmc.artifacts.oci.archive import import_archive

    found, _ = import_archive(store, path, trust=trust)
    bundles = [entry for entry in found if entry.key.kind == KIND]
    if len(bundles) != 1:
        raise ArtifactError(
            f"{path}: holds {len(bundles)} bundles; name one as {STORE}KEY, from `llmc cache ls --kind bundle`"
        )
    if note is not None and note == _archive_note(path):
        _remember(store, note, bundles[0])
    return bundles[0]


def _image(reference: str, store: Store, trust: Trust) -> Entry:
    """Return the bundle of an image; an image named by digest is fetched only once."""
    pinned = is_digest(reference.rpartition("@")[2])
    note = Key("local-image", {"reference": reference}) if pinned else None
    if note is not None and (entry := _noted(store, note)):
        return entry
    from llmc.artifacts.oci import pull_bundle

    entry, _ = pull_bundle(store, reference, trust=trust)
    if note is not None:
        _remember(store, note, entry)
    return entry


def _archive_note(path: Path) -> Key | None:
    """Identify this state of a file; None while the file may still change without a new time stamp."""
    try:
        seen = signature(path.stat())
        real = os.path.realpath(path)
    except OSError:
        return None
    return Key("local-archive", {"path": ascii(real), **seen._asdict()}) if settled(seen) else None


def _noted(store: Store, note: Key) -> Entry | None:
    found = store.lookup(note)
    manifest: Value = None if found is None else found.meta.get("manifest")
    return store.lookup(Key(KIND, {"manifest": manifest})) if is_digest(manifest) else None


def _remember(store: Store, note: Key, entry: Entry) -> None:
    with suppress(CapacityError, UnwritableError):
        store.publish(note, {}, {"manifest": entry.key.components["manifest"]})
