"""The origin of a verification outcome: created here, signed by a key that is trusted here, or neither.

Outcomes created here are noted in the store, under keys of kinds that never come from elsewhere (key.LOCAL):

    entry of kind "local-" K, with the components of a key of kind K
        K = "verify", "reference"     the result created here for that key: outputs and meta as in the shared entry
        K = "bundle"                  meta {"signers": [id, …]}: the outcome that the bundle records was created here,
                                      was signed by these keys, or was verified again here

Nothing else counts as created here, neither presence in the store nor a claim in a bundle or entry. A result without
its note counts as unsigned, however it arrived.

A manifest records which outcomes its compile took from elsewhere, so copies of the bundle record it as well. This can
only lower the origin, never raise it:

    verification.elsewhere = {"outcomes": total, "unsigned": number of these, "signers": [id, …]}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from llmc.artifacts.atomic_write import UnwritableError
from llmc.artifacts.bundle.stored import bundle_key
from llmc.artifacts.key import LOCAL, Key
from llmc.artifacts.log import logger
from llmc.artifacts.store.blobs import BlobMissingError
from llmc.artifacts.store.entries import Entries, Entry, entry_body
from llmc.errors import ArtifactError, CapacityError, DeviceError

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest import Manifest
    from llmc.artifacts.bundle.reader import BundleFiles
    from llmc.artifacts.signing.keyring import Keyring
    from llmc.artifacts.store.store import Store
    from llmc.settings import Settings

ELSEWHERE = "elsewhere"


class Origin(NamedTuple):
    """Who vouches for an outcome: this store ("here"), the keys `signers` ("signed"), or nobody ("unsigned").

    "none" is the origin of a bundle that records no outcome.
    """

    name: Literal["here", "signed", "unsigned", "none"]
    signers: tuple[str, ...] = ()


HERE, UNSIGNED, NONE = Origin("here"), Origin("unsigned"), Origin("none")


def own_key(key: Key) -> Key:
    """Return the key of the note that this store created the result of `key`."""
    return Key(LOCAL + key.kind, key.components)


def joint(origins: Iterable[Origin]) -> Origin:
    """Return the origin of a combined result: the weakest of its parts' origins."""
    found = list(origins)
    if UNSIGNED in found:
        return UNSIGNED
    signers = tuple(sorted({signer for origin in found for signer in origin.signers}))
    return Origin("signed", signers) if signers else HERE


def elsewhere(origins: Iterable[Origin]) -> dict[str, Any]:
    """Return the member of a verification that records foreign outcomes; empty if all were created here."""
    found = list(origins)
    if joint(found) == HERE:
        return {}
    signers = sorted({signer for origin in found for signer in origin.signers})
    return {ELSEWHERE: {"outcomes": len(found), "unsigned": found.count(UNSIGNED), "signers": signers}}


def unsigned_of(verification: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return how many outcomes a manifest records as unsigned, and of how many; (0, 0) for none.

    Returns None if the manifest's member is invalid; then the numbers are unknown.
    """
    if ELSEWHERE not in verification:
        return 0, 0
    said = verification[ELSEWHERE]
    if not isinstance(said, Mapping):
        return None
    unsigned, outcomes = said.get("unsigned"), said.get("outcomes")
    if type(unsigned) is int and type(outcomes) is int and 0 <= unsigned <= outcomes:
        return unsigned, outcomes
    return None


def remember_recorded(store: Store, manifest: Manifest) -> None:
    """Note the origin of the outcome of a bundle compiled here, from its own manifest."""
    verification = manifest.verification
    taken = verification.get(ELSEWHERE, {"unsigned": 0, "signers": []})
    if verification.get("mode") != "none" and not taken["unsigned"]:
        signers = tuple(taken["signers"])
        remember(store, manifest, Origin("signed", signers) if signers else HERE)


def remember(store: Store, manifest: Manifest, origin: Origin) -> None:
    """Note that a bundle was verified here, or with signed predictions; only warn if the store cannot be written."""
    known = _note_of(store, manifest)
    if known is not None and known.meta.get("signers") == []:
        return
    try:
        store.publish(own_key(bundle_key(manifest)), {}, {"signers": list(origin.signers)})
    except (BlobMissingError, CapacityError, UnwritableError) as error:
        logger().warning("the verification of the bundle is not recorded in the store: %s", error)


def _note_of(store: Store, manifest: Manifest) -> Entry | None:
    entries, key = Entries(store.layout), own_key(bundle_key(manifest))
    if (found := entries.read(key)) is not None:
        entries.touch(key)
    return found


class Origins:
    """Determines origins from a store's notes and a keyring. Raises nothing for damaged data."""

    def __init__(self, store: Store, keyring: Keyring) -> None:
        self._store = store
        self._keyring = keyring

    def of_entry(self, entry: Entry) -> tuple[Entry, Origin]:
        """Return an entry with its origin; an entry created here for the same key takes precedence."""
        own = self._store.lookup(own_key(entry.key))
        if own is not None:
            return own, HERE
        return entry, self._signed(entry_body(entry), entry.envelope)

    def of_bundle(self, manifest: Manifest, signature: bytes | None) -> Origin:
        """Return the origin of a bundle's verification outcome; `signature` is its signature file's content."""
        note = _note_of(self._store, manifest)
        if note is not None and (origin := self._noted(note.meta.get("signers"))) is not None:
            return origin
        if not manifest.verification or manifest.verification.get("mode") == "none":
            return NONE
        origin = self._signed(manifest.to_bytes(), signature)
        taken = unsigned_of(manifest.verification)
        return origin if taken is not None and not taken[0] else UNSIGNED

    def _noted(self, signers: object) -> Origin | None:
        if not isinstance(signers, list) or not all(isinstance(signer, str) for signer in signers):
            return None
        try:
            trusted = all(self._keyring.trusts(signer) for signer in signers)
        except ArtifactError:  # the folder of trusted keys is unreadable or unsafe
            return None
        if not trusted:
            return None
        return Origin("signed", tuple(signers)) if signers else HERE

    def _signed(self, content: bytes, signature: bytes | None) -> Origin:
        if signature is None:
            return UNSIGNED
        try:
            verdict = self._keyring.check(content, signature, "")
        except (ArtifactError, DeviceError) as error:
            logger().info("a signature is ignored: %s", error)
            return UNSIGNED
        return UNSIGNED if verdict.key is None else Origin("signed", (verdict.key.key.id,))


def verification_origin(files: BundleFiles, store: Store | None, settings: Settings) -> Origin:
    """Return the origin of the outcome that a bundle records.

    Without `store`, uses the settings' store for the bundle's device; if there can be none, nothing vouches. Raises
    nothing for damaged data.
    """
    from llmc.artifacts.local.opening import open_store
    from llmc.artifacts.signing.keyring import Keyring

    try:
        store = store or open_store(None, settings, files.manifest.device)
    except DeviceError:
        return UNSIGNED
    try:
        signature = files.signature
    except ArtifactError:
        signature = None
    return Origins(store, Keyring.from_settings(settings)).of_bundle(files.manifest, signature)


def origin_words(origin: Origin, verification: Mapping[str, Any]) -> str:
    """Describe the origin of the outcome that a manifest's `verification` records."""
    from llmc.artifacts.signing.keys import short_id

    if origin.name == "signed":
        return f"signed by {', '.join(map(short_id, origin.signers))}, which is trusted"
    if origin.name != "unsigned":
        return {"here": "created here", "none": "no outcome is recorded"}[origin.name]
    taken = unsigned_of(verification)
    if taken is not None and taken[0]:
        return f"{taken[0]} of {taken[1]} outcomes came from elsewhere, unsigned"
    return "from elsewhere, unsigned: this store does not know it"
