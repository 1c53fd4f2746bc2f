"""Where the outcome of a verification comes from: made here, signed by a key that is trusted here, or neither.

What was made here is noted in the store, under keys of kinds that never come in from elsewhere (key.LOCAL):

    entry of kind "local-" K, with the components of a key of kind K
        K = "verify", "reference"     what was made here for that key: outputs and meta as those of the shared entry
        K = "bundle"                  meta {"signers": [id, …]}: the outcome that the bundle records was made here, or
                                      was signed by these keys, or it was verified again here

Nothing else counts as made here: it is not enough that the store has a result, or that a bundle or an entry says so. A
result without its note counts as unsigned, however it came in.

A manifest says which outcomes its compile took from elsewhere, so copies of the bundle say it too. This can only lower
the origin, never raise it:

    verification.elsewhere = {"outcomes": of how many, "unsigned": how many, "signers": [id, …]}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from llmc.artifacts.atomic_write import UnwritableError
from llmc.artifacts.bundle.stored import bundle_key
from llmc.artifacts.key import LOCAL, Key
from llmc.artifacts.log import logger
from llmc.artifacts.store.blobs import BlobMissingError
from llmc.artifacts.store.entries import Entries, entry_body
from llmc.errors import ArtifactError, CapacityError, DeviceError

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest import Manifest
    from llmc.artifacts.bundle.reader import BundleFiles
    from llmc.artifacts.signing.keyring import Keyring
    from llmc.artifacts.store.entries import Entry
    from llmc.artifacts.store.store import Store
    from llmc.settings import Settings

ELSEWHERE = "elsewhere"


class Origin(NamedTuple):
    """Who vouches for an outcome: this store ("here"), the keys `signers` ("signed"), or nobody ("unsigned").

    "none" is that of a bundle that records no outcome.
    """

    name: Literal["here", "signed", "unsigned", "none"]
    signers: tuple[str, ...] = ()


HERE, UNSIGNED, NONE = Origin("here"), Origin("unsigned"), Origin("none")


def own_key(key: Key) -> Key:
    """The key of the note that this store made the result of `key`."""
    return Key(LOCAL + key.kind, key.components)


def joint(origins: Iterable[Origin]) -> Origin:
    """The origin of a result that is made of several results: the worst of theirs."""
    found = list(origins)
    if UNSIGNED in found:
        return UNSIGNED
    signers = tuple(sorted({signer for origin in found for signer in origin.signers}))
    return Origin("signed", signers) if signers else HERE


def elsewhere(origins: Iterable[Origin]) -> dict[str, Any]:
    """The member of a verification that says where its outcomes come from; none where all were made here."""
    found = list(origins)
    if joint(found) == HERE:
        return {}
    signers = sorted({signer for origin in found for signer in origin.signers})
    return {ELSEWHERE: {"outcomes": len(found), "unsigned": found.count(UNSIGNED), "signers": signers}}


def unsigned_of(verification: Mapping[str, Any]) -> tuple[int, int] | None:
    """How many of how many outcomes a manifest says were taken unsigned; (0, 0) for none.

    None if the manifest's member cannot be read; then the numbers are unknown.
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
    """Note where the outcome of a bundle comes from that is compiled here, as its own manifest says."""
    verification = manifest.verification
    taken = verification.get(ELSEWHERE, {"unsigned": 0, "signers": []})
    if verification.get("mode") != "none" and not taken["unsigned"]:
        signers = tuple(taken["signers"])
        remember(store, manifest, Origin("signed", signers) if signers else HERE)


def remember(store: Store, manifest: Manifest, origin: Origin) -> None:
    """Note that a bundle was verified here, or with `signed` predictions; nothing happens if the store cannot be
    written.
    """
    known = _note_of(store, manifest)
    if known is not None and known.meta.get("signers") == []:
        return
    try:
        store.publish(own_key(bundle_key(manifest)), {}, {"signers": list(origin.signers)})
    except (BlobMissingError, CapacityError, UnwritableError) as error:
        logger().warning("that the bundle was verified is not remembered: %s", error)


def _note_of(store: Store, manifest: Manifest) -> Entry | None:
    """What was noted of a bundle, noted as used."""
    entries, key = Entries(store.layout), own_key(bundle_key(manifest))
    if (found := entries.read(key)) is not None:
        entries.touch(key)
    return found


class Origins:
    """Says where things come from, by what a store noted and by a keyring. Raises nothing for what is damaged."""

    def __init__(self, store: Store, keyring: Keyring) -> None:
        self._store = store
        self._keyring = keyring

    def of_entry(self, entry: Entry) -> tuple[Entry, Origin]:
        """An entry of the store, or what was made here for its key, which wins; and where that comes from."""
        own = self._store.lookup(own_key(entry.key))
        if own is not None:
            return own, HERE
        return entry, self._signed(entry_body(entry), entry.envelope)

    def of_bundle(self, manifest: Manifest, signature: bytes | None) -> Origin:
        """Where the outcome of a bundle's verification comes from; `signature` is its signature file's content."""
        note = _note_of(self._store, manifest)
        if note is not None and (origin := self._noted(note.meta.get("signers"))) is not None:
            return origin
        if not manifest.verification or manifest.verification.get("mode") == "none":
            return NONE
        origin = self._signed(manifest.to_bytes(), signature)
        taken = unsigned_of(manifest.verification)
        return origin if taken is not None and not taken[0] else UNSIGNED

    def _noted(self, signers: object) -> Origin | None:
        """The origin in a note, as long as its signers are trusted."""
        if not isinstance(signers, list) or not all(isinstance(signer, str) for signer in signers):
            return None
        try:
            trusted = all(self._keyring.trusts(signer) for signer in signers)
        except ArtifactError:  # the folder of trusted keys
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
            logger().info("a signature counts for nothing: %s", error)
            return UNSIGNED
        return UNSIGNED if verdict.key is None else Origin("signed", (verdict.key.key.id,))


def verification_origin(files: BundleFiles, store: Store | None, settings: Settings) -> Origin:
    """Where the outcome that a bundle records comes from.

    Without `store`, the settings' store for the bundle's device is looked into; where there can be none, nothing
    vouches. Raises nothing for what is damaged.
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
    """An origin, for people: where the outcome comes from that `verification` of a manifest records."""
    from llmc.artifacts.signing.keys import short_id

    if origin.name == "signed":
        return f"signed by {', '.join(map(short_id, origin.signers))}, which is trusted"
    if origin.name != "unsigned":
        return {"here": "made here", "none": "no outcome is recorded"}[origin.name]
    taken = unsigned_of(verification)
    if taken is not None and taken[0]:
        return f"{taken[0]} of {taken[1]} outcomes came from elsewhere, unsigned"
    return "from elsewhere, unsigned: this store does not know it"
