"""What has to be signed in an archive: native code, as from anywhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.artifacts.archives.reader import import_archive
from llmc.artifacts.bundle.stored import publish_bundle
from llmc.artifacts.bundle.trust import UntrustedError
from llmc.artifacts.key import Key
from llmc.artifacts.store.store import Store
from tests.artifacts.archives.helpers import Words, bundle, export_all, export_one, sign
from tests.artifacts.helpers import key, manifest


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def taken(store: Store, data: bytes, **trust: bool) -> int:
    path = store.root.with_name("a.tar")
    path.write_bytes(data)
    return len(import_archive(store, path, trust=Words(**trust)).entries)


def refused(store: Store, data: bytes) -> str:
    with pytest.raises(UntrustedError) as caught:
        taken(store, data)
    assert store.entries() == []
    return str(caught.value)


def test_a_native_bundle_needs_a_signature_or_leave(tmp_path: Path, store: Store) -> None:
    data = export_one(bundle(tmp_path / "bundle"), tmp_path / "a.tar")
    assert "native code" in refused(store, data)
    assert taken(Store(tmp_path / "allowed"), data, allow_unsigned=True) == 1
    signed = bundle(tmp_path / "signed", sign(manifest().to_bytes()))
    assert taken(store, export_one(signed, tmp_path / "b.tar")) == 1


def test_a_bundle_among_several_is_judged_too(tmp_path: Path, store: Store) -> None:
    theirs = Store(tmp_path / "theirs")
    theirs.publish(key("weights"), {"weights": theirs.put_bytes(b"1")})
    taken(theirs, export_one(bundle(tmp_path / "bundle"), tmp_path / "a.tar"), allow_unsigned=True)
    assert "native code" in refused(store, export_all(theirs, tmp_path / "all.tar"))


@pytest.mark.parametrize(
    "of", [key("kernels"), key("slots", target="xla"), key(state="native"), key(target="new"), key("new")]
)
def test_an_entry_of_code_needs_one(tmp_path: Path, store: Store, of: Key) -> None:
    theirs = Store(tmp_path / "theirs")
    theirs.publish(of, {"code": theirs.put_bytes(b"code")})
    data = export_all(theirs, tmp_path / "all.tar")
    assert "native code" in refused(store, data)
    assert taken(store, data, allow_unsigned=True) == 1


def test_data_comes_as_it_is_unless_it_begins_as_code_does(tmp_path: Path, store: Store) -> None:
    theirs = Store(tmp_path / "theirs")
    theirs.publish(key(), {"graph": theirs.put_bytes(b"{}")})
    theirs.publish(key("weights"), {"weights": theirs.put_bytes(b"\x7fELF" + bytes(100))})
    data = export_all(theirs, tmp_path / "all.tar")
    assert "holds a shared library (ELF)" in refused(store, data)
    assert taken(store, data, allow_unsigned=True) == 2


def test_a_portable_bundle_that_holds_a_library_is_refused(tmp_path: Path, store: Store) -> None:
    theirs = Store(tmp_path / "theirs")
    library = theirs.put_bytes(b"\x7fELF" + bytes(100))
    members = manifest().to_dict()
    executables = [{**item, "state": "portable", "blob": library.digest} for item in members["executables"]]
    made = manifest(executables=executables, files={}, blobs={library.digest: library.size})
    entry = publish_bundle(theirs, made)
    assert "holds a shared library (ELF)" in refused(store, export_one(entry, tmp_path / "a.tar", theirs))
