"""Who vouches for the outcome of a verification: what a store noted itself, and keys that are trusted; nothing else."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from llmc.artifacts.bundle.manifest import Manifest
from llmc.artifacts.bundle.reader import BundleFiles
from llmc.artifacts.bundle.stored import bundle_key, publish_bundle
from llmc.artifacts.bundle.writer import write_bundle
from llmc.artifacts.key import canonical_json
from llmc.artifacts.local.origins import (
    HERE,
    NONE,
    UNSIGNED,
    Origin,
    Origins,
    elsewhere,
    joint,
    origin_words,
    own_key,
    remember,
    remember_recorded,
    unsigned_of,
    verification_origin,
)
from llmc.artifacts.remotes.folder import FolderRemote
from llmc.artifacts.remotes.transfer import pull, push
from llmc.artifacts.signing.signer import Signer
from llmc.artifacts.store.entries import Entries, Entry, entry_body
from llmc.artifacts.store.store import Store
from llmc.settings import Settings
from tests.artifacts.helpers import CONTENT, flip, key, manifest, sources
from tests.artifacts.signing.helpers import edited, keyring, signer

VERIFIED = {"mode": "sample", "mean_kl": 0.0}


@pytest.fixture
def us(tmp_path: Path) -> Signer:
    return signer(tmp_path, 1)


@pytest.fixture
def origins(store: Store, us: Signer, tmp_path: Path) -> Origins:
    """Of the store, where the key `us` is trusted."""
    return Origins(store, keyring(tmp_path / "trusted", us))


def built(**changes: Any) -> Manifest:
    return manifest(**{"verification": VERIFIED, **changes})


def taken(**elsewhere: Any) -> Manifest:
    return built(verification={**VERIFIED, "elsewhere": elsewhere})


def signed(us: Signer) -> Origin:
    return Origin("signed", (us.public.id,))


# Bundles


def test_a_bundle_is_from_here_where_that_was_noted(store: Store, origins: Origins) -> None:
    assert origins.of_bundle(built(), None) == UNSIGNED
    remember(store, built(), HERE)
    assert origins.of_bundle(built(), None) == HERE
    assert origins.of_bundle(built(device="hpu"), None) == UNSIGNED, "every word of it counts"


def test_that_the_store_has_a_bundle_says_nothing(store: Store, origins: Origins) -> None:
    for data in CONTENT.values():
        store.put_bytes(data)
    publish_bundle(store, built())
    assert origins.of_bundle(built(), None) == UNSIGNED


def test_a_signature_of_a_trusted_key_vouches(origins: Origins, us: Signer, tmp_path: Path) -> None:
    signature = us.sign(built().to_bytes())
    assert origins.of_bundle(built(), signature) == signed(us)
    assert origins.of_bundle(built(device="hpu"), signature) == UNSIGNED
    assert origins.of_bundle(built(), signer(tmp_path, 2).sign(built().to_bytes())) == UNSIGNED
    for wrong in (b"", b"{}", edited(signature, payload="e30=")):
        assert origins.of_bundle(built(), wrong) == UNSIGNED


def test_a_signature_that_cannot_be_checked_vouches_for_nothing(
    origins: Origins, us: Signer, monkeypatch: pytest.MonkeyPatch
) -> None:
    signature = us.sign(built().to_bytes())
    monkeypatch.setitem(__import__("sys").modules, "cryptography.hazmat.primitives.asymmetric.ed25519", None)
    assert origins.of_bundle(built(), signature) == UNSIGNED


def test_no_outcome_is_none_unless_it_was_verified_here(store: Store, origins: Origins) -> None:
    for verification in ({}, {"mode": "none"}, {"mode": "none", "why": "no weights"}):
        assert origins.of_bundle(built(verification=verification), None) == NONE
    assert origins.of_bundle(built(verification={"mean_kl": 0.0}), None) == UNSIGNED
    remember(store, built(verification={}), HERE)
    assert origins.of_bundle(built(verification={}), None) == HERE


@pytest.mark.parametrize("count", [1, 3])
def test_what_was_taken_unsigned_makes_a_signed_bundle_worse(origins: Origins, us: Signer, count: int) -> None:
    worse, better = taken(outcomes=3, unsigned=count, signers=[]), taken(outcomes=3, unsigned=0, signers=["x"])
    assert origins.of_bundle(worse, us.sign(worse.to_bytes())) == UNSIGNED
    assert origins.of_bundle(better, us.sign(better.to_bytes())) == signed(us)
    assert origins.of_bundle(better, None) == UNSIGNED


@pytest.mark.parametrize("said", [None, 0, "", [], {}, {"unsigned": 0}, {"outcomes": 1}, {"outcomes": 1, "unsigned": 2},
                                  {"outcomes": 1, "unsigned": -1}, {"outcomes": 1, "unsigned": 0.0},
                                  {"outcomes": True, "unsigned": False}])  # fmt: skip
def test_what_cannot_be_understood_vouches_for_nothing(origins: Origins, us: Signer, said: Any) -> None:
    strange = built(verification={**VERIFIED, "elsewhere": said})
    assert unsigned_of(strange.verification) is None
    assert origins.of_bundle(strange, us.sign(strange.to_bytes())) == UNSIGNED
    assert "from elsewhere, unsigned" in origin_words(UNSIGNED, strange.verification)


def test_a_bundle_compiled_with_signed_outcomes_is_as_good_as_its_signers(
    store: Store, us: Signer, tmp_path: Path
) -> None:
    bundle = taken(outcomes=3, unsigned=0, signers=[us.public.id])
    remember_recorded(store, bundle)
    trusted, forgotten = keyring(tmp_path / "trusted", us), keyring(tmp_path / "nobody")
    assert Origins(store, trusted).of_bundle(bundle, None) == signed(us)
    assert Origins(store, forgotten).of_bundle(bundle, None) == UNSIGNED
    (tmp_path / "nobody" / "broken.pub").write_text("")
    assert Origins(store, forgotten).of_bundle(bundle, None) == UNSIGNED
    remember(store, bundle, HERE)
    remember_recorded(store, bundle)
    assert Origins(store, forgotten).of_bundle(bundle, None) == HERE, "verified here since, and that stays"


def test_nothing_is_noted_of_what_was_taken_unsigned_or_not_verified(store: Store) -> None:
    remember_recorded(store, taken(outcomes=3, unsigned=1, signers=[]))
    remember_recorded(store, built(verification={"mode": "none"}))
    assert store.entries() == []


@pytest.mark.parametrize("meta", [{}, {"signers": None}, {"signers": "x"}, {"signers": [1]}, {"signers": ["x"]}])
def test_a_note_that_makes_no_sense_counts_as_none(store: Store, origins: Origins, meta: dict[str, Any]) -> None:
    store.publish(own_key(bundle_key(built())), {}, meta)
    assert origins.of_bundle(built(), None) == UNSIGNED


def test_a_torn_note_counts_as_none(store: Store, origins: Origins) -> None:
    remember(store, built(), HERE)
    note = own_key(bundle_key(built()))
    flip(store.layout.entry(note.kind, note.hex))
    assert origins.of_bundle(built(), None) == UNSIGNED


def test_a_store_that_cannot_be_written_does_without(
    tmp_path: Path, us: Signer, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    nowhere = Store(tmp_path / "file" / "store")
    with caplog.at_level(logging.WARNING):
        remember(nowhere, built(), HERE)
    assert "is not recorded" in caplog.text
    assert Origins(nowhere, keyring(tmp_path / "trusted", us)).of_bundle(built(), None) == UNSIGNED


def test_notes_never_leave_nor_come_in(store: Store, origins: Origins, us: Signer, tmp_path: Path) -> None:
    theirs = Store(tmp_path / "theirs")
    remember(theirs, built(), HERE)
    remote = FolderRemote(str(tmp_path / "far"))
    assert push(theirs, theirs.entries(), remote).entries == 0
    for note in theirs.entries():
        Entries(Store(tmp_path / "far").layout).adopt(note)
    assert pull(store, remote, trust=keyring(tmp_path / "trusted", us, allow_unsigned=True)).entries == 0
    beside = Store(tmp_path / "empty", shared=[tmp_path / "theirs", tmp_path / "far"])
    for own in (store, beside):
        assert Origins(own, keyring(tmp_path / "trusted", us)).of_bundle(built(), None) == UNSIGNED


def test_of_a_folder(store: Store, us: Signer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMC_CACHE_DIR", str(store.root))
    keyring(tmp_path / "trusted", us)
    monkeypatch.setenv("LLMC_TRUSTED_KEYS", str(tmp_path / "trusted"))
    bundle = write_bundle(tmp_path / "bundle", built(), sources(tmp_path / "files"), us.sign(built().to_bytes()))
    with BundleFiles.open(bundle) as files:
        assert verification_origin(files, None, Settings.from_environment()) == signed(us)
        (bundle / "signature.json").write_bytes(bytes(2 << 20))
        assert verification_origin(files, None, Settings.from_environment()) == UNSIGNED
        remember(store, built(), HERE)
        assert verification_origin(files, None, Settings.from_environment()) == HERE
        assert verification_origin(files, Store(tmp_path / "other"), Settings.from_environment()) == UNSIGNED


# Entries


def foreign(store: Store, us: Signer | None = None) -> Entry:
    """An outcome that is in the store, nobody knows how."""
    entry = store.publish(key("verify"), {}, {"kl": [0.0]})
    if us is None:
        return entry
    import json

    return Entries(store.layout).adopt(entry._replace(signature=json.loads(us.sign(entry_body(entry)))))


def test_an_entry_is_from_here_where_its_own_copy_is(store: Store, origins: Origins) -> None:
    entry = foreign(store)
    assert origins.of_entry(entry) == (entry, UNSIGNED)
    store.publish(own_key(entry.key), {}, {"kl": [1.0]})
    mine, origin = origins.of_entry(entry)
    assert (mine.meta, origin) == ({"kl": [1.0]}, HERE), "and it is what was made here that counts"


def test_an_entry_that_a_trusted_key_signed(store: Store, origins: Origins, us: Signer, tmp_path: Path) -> None:
    entry = foreign(store, us)
    assert origins.of_entry(entry) == (entry, signed(us))
    altered = entry._replace(meta={"kl": [2.0]})
    assert origins.of_entry(altered) == (altered, UNSIGNED)
    assert Origins(store, keyring(tmp_path / "nobody")).of_entry(entry) == (entry, UNSIGNED)


# Several


def test_the_worst_counts() -> None:
    a, b = Origin("signed", ("a",)), Origin("signed", ("b",))
    assert joint([HERE, HERE]) == HERE
    assert joint([HERE, b, a, b]) == Origin("signed", ("a", "b"))
    assert joint([HERE, a, UNSIGNED]) == UNSIGNED


def test_what_a_manifest_says_of_elsewhere() -> None:
    a, b = Origin("signed", ("a",)), Origin("signed", ("b",))
    assert elsewhere([HERE, HERE]) == {}
    found = elsewhere([b, HERE, UNSIGNED, a, UNSIGNED])
    assert found == {"elsewhere": {"outcomes": 5, "unsigned": 2, "signers": ["a", "b"]}}
    assert canonical_json(found) and unsigned_of(found) == (2, 5)
    assert unsigned_of({}) == (0, 0)
    assert origin_words(UNSIGNED, found) == "2 of 5 outcomes came from elsewhere, unsigned"


def test_every_origin_has_words() -> None:
    known = Origin("signed", ("0123456789abcdef" * 4,))
    words = [origin_words(origin, VERIFIED) for origin in (HERE, known, UNSIGNED, NONE)]
    assert words == [
        "created here", "signed by 0123456789abcdef, which is trusted",
        "from elsewhere, unsigned: this store does not know it", "no outcome is recorded",
    ]  # fmt: skip
