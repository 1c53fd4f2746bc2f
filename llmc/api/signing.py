"""Sign bundles and stored results, and describe a bundle's signature (`llmc cache sign`)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmc.errors import CapacityError, InputError

if TYPE_CHECKING:
    from llmc.artifacts.bundle.reader import BundleFiles
    from llmc.artifacts.signing.signer import Signer
    from llmc.artifacts.store.store import Store


@dataclass(frozen=True)
class Signed:
    """What was signed: a bundle folder, or a store entry by kind and key. `stored` is whether the store has the
    signature too; `not_stored` says why it does not."""

    what: str
    kind: str
    digest: str
    stored: bool = True
    not_stored: str = ""


def sign_bundle(signer: Signer, store: Store, folder: str) -> Signed:
    """Sign a bundle folder, and the same bundle in the store if it is there."""
    from llmc.artifacts.atomic_write import UnwritableError
    from llmc.artifacts.bundle.reader import BundleFiles
    from llmc.artifacts.bundle.stored import bundle_key, publish_bundle, read_bundle
    from llmc.artifacts.bundle.writer import write_signature

    files = BundleFiles.open(folder)
    content, digest = files.manifest.to_bytes(), files.manifest.digest
    write_signature(files.folder, signer.sign(content, files.signature))
    entry = store.lookup(bundle_key(files.manifest))
    if entry is None:
        return Signed(folder, "bundle", digest, False)
    manifest, there = read_bundle(store, entry)
    try:
        publish_bundle(store, manifest, signer.sign(content, there))
    except (CapacityError, UnwritableError) as error:
        return Signed(folder, "bundle", digest, False, str(error))
    return Signed(folder, "bundle", digest)


def sign_entry(signer: Signer, store: Store, prefix: str) -> Signed:
    """Sign the store entry with a key or its first digits. Raises ArtifactError and InputError."""
    from llmc.artifacts.bundle.stored import KIND, publish_bundle, read_bundle
    from llmc.artifacts.store.entries import Entries, entry_body

    entry = store.find(prefix)
    if entry.key.is_local:
        raise InputError(
            f"{entry.key.kind} {entry.key.short} never leaves this machine and needs no signature; leave it out"
        )
    if entry.key.kind == KIND:
        manifest, there = read_bundle(store, entry)
        publish_bundle(store, manifest, signer.sign(manifest.to_bytes(), there))
    else:
        signature = json.loads(signer.sign(entry_body(entry), entry.envelope))
        Entries(store.layout).adopt(entry._replace(signature=signature))
    return Signed(f"{entry.key.kind} {entry.key.short}", entry.key.kind, entry.key.digest)


def signature_status(files: BundleFiles) -> tuple[dict[str, Any], list[str]]:
    """The status of a bundle's signature, and a list of problems with it, such as a missing one that is required.

    `{"status": "trusted" | "unknown" | "invalid" | "none", "keys": [id, …], "name": name of the trusted key | None}`
    """
    from llmc.artifacts.bundle.trust import UntrustedError, code_of_bundle
    from llmc.artifacts.signing.keyring import Keyring, Verdict
    from llmc.settings import Settings

    keyring = Keyring.from_settings(Settings.from_environment())
    content, signature, origin = files.manifest.to_bytes(), files.signature, str(files.folder)
    verdict = Verdict(None, ())
    try:
        if signature is not None:
            verdict = keyring.check(content, signature, origin)
        if keyring.require_signatures:
            native = code_of_bundle(files.manifest) is not None
            keyring.require(content, signature, native=native, origin=origin)
    except UntrustedError as error:
        errors = [str(error)]
    else:
        errors = []
    if verdict.key is not None:
        return {"status": "trusted", "keys": [verdict.key.key.id], "name": verdict.key.name}, errors
    status = "unknown" if verdict.claimed else "none" if signature is None else "invalid"
    return {"status": status, "keys": list(verdict.claimed), "name": None}, errors
