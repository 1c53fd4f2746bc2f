"""Signatures at the border: what is signed on the way out, and what is let in; bundles as a whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmc.artifacts.bundle.manifest import SIGNATURE_NAME
from llmc.artifacts.bundle.stored import bundle_key, checkout
from llmc.artifacts.bundle.trust import Trust
from llmc.artifacts.remotes.base import blob_name
from llmc.artifacts.remotes.folder import FolderRemote
from llmc.artifacts.remotes.transfer import pull, push
from llmc.artifacts.store.entries import encode_entry, entry_body
from llmc.artifacts.store.store import Store
from tests.artifacts.helpers import CONTENT, DIGESTS, files_below, flip, key, manifest, overwrite
from tests.artifacts.remotes.helpers import FakeSigner, FakeTrust, Watched, add_manifest, file_of, fill, native_key

TRUST = FakeTrust("alice")


# Trust


@pytest.mark.parametrize("meta", [{}, {"state": "native"}])
def test_native_code_has_to_be_signed_or_allowed(
    store: Store, other: Store, folder: FolderRemote, far: Path, meta: dict[str, str]
) -> None:
    native = store.publish(key() if meta else native_key(), {"code": store.put_bytes(b"code")}, meta)
    push(store, [native, *fill(store, 1)], folder)
    watched = Watched(far)
    report = pull(other, watched, trust=TRUST)
    (refused,) = report.refused
    assert "not signed" in refused.reason
    assert native.key.short in refused.reason
    assert report.entries == 1
    assert blob_name(native.outputs["code"].digest) not in watched.names("download")
    assert pull(other, folder, trust=FakeTrust(allow=True)).entries == 1


def test_what_is_signed_when_pushed_is_taken(store: Store, other: Store, folder: FolderRemote) -> None:
    native = store.publish(native_key(), {"code": store.put_bytes(b"code")})
    assert push(store, [native], folder, signer=FakeSigner()).entries == 1
    assert pull(other, folder, trust=FakeTrust("bob")).entries == 0
    assert pull(other, folder, trust=TRUST).entries == 1
    found = other.lookup(native.key)
    assert found is not None and found.signature is not None
    assert store.find(native.key.hex).signature is None  # the store that is pushed stays as it is


def test_signing_later_moves_the_entry_alone(store: Store, other: Store, folder: FolderRemote) -> None:
    native = store.publish(native_key(), {"code": store.put_bytes(b"code")})
    push(store, [native], folder)
    pull(other, folder, trust=FakeTrust(allow=True))
    report = push(store, [native], folder, signer=FakeSigner())
    assert (report.entries, report.blobs) == (1, 0)
    assert push(store, [native], folder, signer=FakeSigner()).entries == 0
    report = pull(other, folder, trust=TRUST)
    assert (report.entries, report.blobs) == (1, 0)


def test_signatures_of_others_stay(store: Store, folder: FolderRemote, far: Path, tmp_path: Path) -> None:
    native = store.publish(native_key(), {"code": store.put_bytes(b"code")})
    bundle = add_manifest(store)
    push(store, [native, bundle], folder, signer=FakeSigner("alice"))
    push(store, [native, bundle], folder, signer=FakeSigner("bob"))
    push(store, [native, bundle], folder)
    for name in ("alice", "bob"):
        target = Store(tmp_path / name)
        assert pull(target, folder, trust=FakeTrust(name)).refused == ()


def test_an_unsigned_entry_does_not_replace_a_signed_one(store: Store, other: Store, folder: FolderRemote) -> None:
    native = store.publish(native_key(), {"code": store.put_bytes(b"code")})
    push(store, [native], folder, signer=FakeSigner())
    rebuilt = other.publish(native_key(), {"code": other.put_bytes(b"other code")})
    assert push(other, [rebuilt], folder).entries == 0
    assert pull(store, folder, trust=TRUST).refused == ()
    assert store.find(native.key.hex).outputs == native.outputs


def test_an_altered_entry_with_a_signature_of_another_is_refused(
    store: Store, other: Store, folder: FolderRemote, far: Path
) -> None:
    native = store.publish(native_key(), {"code": store.put_bytes(b"code")})
    push(store, [native], folder, signer=FakeSigner())
    signed = json.loads(file_of(far, native).read_bytes())["signature"]
    evil = store.put_bytes(b"evil")
    push(store, [store.publish(key(n=1), {"x": evil})], folder)
    overwrite(file_of(far, native), encode_entry(native._replace(outputs={"code": evil}, signature=signed)))
    report = pull(other, folder, trust=FakeTrust("alice", allow=True))
    assert "signature is not valid" in report.refused[0].reason
    assert other.lookup(native.key) is None


# Bundles


def test_a_bundle_is_pushed_pulled_and_opened(store: Store, other: Store, folder: FolderRemote, tmp_path: Path) -> None:
    bundle = add_manifest(store)
    assert push(store, [bundle], folder, signer=FakeSigner()).entries == 1
    assert SIGNATURE_NAME not in store.find(bundle.key.hex).outputs
    assert pull(other, folder, trust=TRUST, kind="bundle").entries == 1
    from llmc.artifacts.bundle.reader import BundleFiles

    built = checkout(other, other.find(bundle.key.hex), tmp_path / "bundle")
    with BundleFiles.open(built) as files:
        assert files.verify() == []
        assert files.signature == FakeSigner().sign(manifest().to_bytes())


def test_a_bundle_is_judged_before_its_blobs_are_moved(store: Store, other: Store, far: Path) -> None:
    bundle = add_manifest(store)
    push(store, [bundle], FolderRemote(str(far)))
    remote, trust = Watched(far), FakeTrust("alice")
    report = pull(other, remote, trust=trust)
    assert "not signed" in report.refused[0].reason
    assert remote.names("download") == []
    assert len(trust.requested) == 1
    assert files_below(other.root) == []


def test_a_bundle_without_native_code_needs_no_signature(store: Store, other: Store, folder: FolderRemote) -> None:
    executables = [{**item._asdict(), "state": "portable"} for item in manifest().executables]
    push(store, [add_manifest(store, executables=executables)], folder)
    assert pull(other, folder, trust=TRUST).entries == 1


def test_a_bundle_that_does_not_agree_with_its_entry_is_refused(
    store: Store, other: Store, folder: FolderRemote, far: Path
) -> None:
    bundle = add_manifest(store)
    push(store, [bundle], folder, signer=FakeSigner())
    evil = store.put_bytes(b"evil")
    push(store, [store.publish(key(n=1), {"x": evil})], folder)
    path = file_of(far, bundle)
    outputs = dict(json.loads(path.read_bytes())["entry"]["outputs"])
    for change in (
        {DIGESTS["decode"]: evil._asdict()},
        {"manifest.json": evil._asdict()},
        {"extra": evil._asdict()},
    ):
        from llmc.artifacts.digest import Blob

        changed = {name: Blob(**value) for name, value in {**outputs, **change}.items()}
        overwrite(path, encode_entry(bundle._replace(outputs=changed)))
        report = pull(other, folder, trust=FakeTrust("alice", allow=True), kind="bundle")
        assert (report.entries, len(report.refused)) == (0, 1)
    without = bundle._replace(outputs={"x": evil})
    overwrite(path, encode_entry(without))
    assert "names no manifest.json" in pull(other, folder, trust=TRUST, kind="bundle").refused[0].reason


def test_a_damaged_manifest_in_the_remote_is_refused(
    store: Store, other: Store, folder: FolderRemote, far: Path
) -> None:
    bundle = add_manifest(store)
    push(store, [bundle], folder, signer=FakeSigner())
    flip(file_of(far, bundle, "manifest.json"))
    assert "is damaged" in pull(other, folder, trust=TRUST).refused[0].reason


def test_the_key_of_a_pulled_bundle_is_that_of_its_manifest(store: Store, other: Store, folder: FolderRemote) -> None:
    add_manifest(store)
    push(store, store.entries(), folder)
    pull(other, folder, trust=FakeTrust(allow=True))
    (found,) = other.entries("bundle")
    assert found.key == bundle_key(manifest())
    assert {digest for digest in found.outputs if digest.startswith("sha256:")} == set(DIGESTS.values())
    assert other.get_bytes(DIGESTS["weights"]) == CONTENT["weights"]
    assert entry_body(found) == entry_body(store.find(found.key.hex))


def test_a_trust_is_any_object_with_require() -> None:
    trust: Trust = FakeTrust()
    assert trust.require(b"", None, native=False, origin="here") is None
