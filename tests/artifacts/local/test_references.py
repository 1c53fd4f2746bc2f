"""Naming a bundle by archive, by store key or by image: what is resolved, what is remembered, what heals."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from llmc.artifacts import oci
from llmc.artifacts.bundle.reader import BundleFiles
from llmc.artifacts.bundle.stored import add_bundle, bundle_key, publish_bundle
from llmc.artifacts.bundle.trust import UntrustedError
from llmc.artifacts.local.references import find_bundle, is_reference, resolve
from llmc.artifacts.oci import archive as archive_module
from llmc.artifacts.oci.archive import export_images
from llmc.artifacts.store.store import Store
from llmc.errors import ArtifactError
from llmc.settings import Settings
from tests.artifacts.helpers import DIGESTS, bundle, child, finish, flip, key, manifest, overwrite
from tests.artifacts.oci.helpers import Anyone

HEX = bundle_key(manifest()).hex
DIGEST = manifest().digest


@pytest.fixture
def archive(tmp_path: Path, store: Store) -> Path:
    """An archive that has been there for a while."""
    path = tmp_path / "a.tar"
    export(path, bundle(tmp_path / "bundle"))
    settle()
    return path


@pytest.fixture
def imports(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every import of the test."""
    seen: list[Any] = []
    original = archive_module.import_archive

    def counted(*arguments: Any, **named: Any) -> Any:
        seen.append(arguments)
        return original(*arguments, **named)

    monkeypatch.setattr(archive_module, "import_archive", counted)
    return seen


def export(path: Path, *bundles: BundleFiles) -> None:
    """Write an archive, by way of a store of its own."""
    with TemporaryDirectory() as name:
        store = Store(name)
        export_images(store, [add_bundle(store, files) for files in bundles], path)


def settle() -> None:
    """Let the file system's clock go on, so that a file counts as unchanged."""
    time.sleep(0.03)


def folder(store: Store, text: object, settings: Settings | None = None) -> Path:
    return resolve(str(text), settings or Settings(), store, Anyone())


def sound(path: Path) -> bool:
    return BundleFiles.open(path).manifest == manifest() and BundleFiles.open(path).verify() == []


@pytest.mark.parametrize("text", ["a.tar", "x/a.tar", "store:1234", "oci://host/name", "oci-layout:x"])
def test_what_looks_like_a_reference(text: str) -> None:
    assert is_reference(text)


@pytest.mark.parametrize(
    "text", ["bundle", "./b", "a.gguf", "org/model", "a.tar.gz", "a.tar.zst", "model.safetensors", "storex"]
)
def test_what_does_not_stays_a_path(text: str, store: Store) -> None:
    assert not is_reference(text)
    assert folder(store, text) == Path(text)
    assert not store.root.exists()


def test_a_folder_stays_itself_whatever_its_name(tmp_path: Path, store: Store) -> None:
    (tmp_path / "odd.tar").mkdir()
    assert folder(store, tmp_path / "odd.tar") == tmp_path / "odd.tar"
    assert not store.root.exists()


def test_an_archive_is_imported_once(archive: Path, store: Store, imports: list[Any]) -> None:
    found = folder(store, archive)
    assert sound(found) and found == store.layout.bundles / HEX
    before = {path: path.stat().st_ino for path in found.rglob("*")}
    assert folder(Store(store.root), archive) == found
    assert {path: path.stat().st_ino for path in found.rglob("*") if path.name != ".stamps.json"} == before
    assert len(imports) == 1


def test_the_second_start_reads_no_blob(archive: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(store, archive)
    for name in ("llmc.artifacts.store.blobs.digest_file", "llmc.artifacts.bundle.reader.digest_file"):
        monkeypatch.setattr(name, lambda *_: pytest.fail("a blob is hashed"))
    assert folder(Store(store.root), archive) == store.layout.bundles / HEX


def test_the_folder_shares_its_blobs_with_the_store(archive: Path, store: Store) -> None:
    found = folder(store, archive)
    for digest in manifest().blobs:
        assert (found / "blobs" / "sha256" / digest[7:]).samefile(store.layout.blob(digest))


def test_another_archive_of_that_name_is_imported_anew(archive: Path, store: Store, imports: list[Any]) -> None:
    folder(store, archive)
    export(archive, bundle(archive.parent / "other", target="other"))
    assert BundleFiles.open(folder(store, archive)).manifest == manifest(target="other")
    assert len(imports) == 2


def test_an_archive_that_may_still_change_unseen_is_not_remembered(
    archive: Path, store: Store, imports: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmc.artifacts.local.references.settled", lambda _: False)
    for _ in range(2):
        folder(store, archive)
    assert len(imports) == 2 and store.entries("local-archive") == []


def test_what_was_lost_from_the_store_comes_from_the_archive_again(
    archive: Path, store: Store, imports: list[Any]
) -> None:
    found = folder(store, archive)
    flip(store.layout.blob(DIGESTS["weights"]))
    assert store.verify().bad != []
    assert folder(Store(store.root), archive) == found
    assert sound(found), "the folder had a link to the damaged file"
    assert len(imports) == 2


def test_a_folder_with_a_damaged_manifest_is_built_again(archive: Path, store: Store) -> None:
    found = folder(store, archive)
    overwrite(found / "manifest.json", b"{}")
    assert sound(folder(store, archive))


def test_an_archive_of_several_bundles_names_none(tmp_path: Path, store: Store) -> None:
    items = [bundle(tmp_path / "one"), bundle(tmp_path / "two", target="other")]
    export(tmp_path / "a.tar", *items)
    with pytest.raises(ArtifactError, match="holds 2 bundles; name one as store:KEY"):
        folder(store, tmp_path / "a.tar")
    assert sound(folder(store, f"store:{HEX[:8]}"))


def test_a_signature_is_requested_where_the_settings_do(tmp_path: Path, archive: Path, store: Store) -> None:
    allowed = Settings(trusted_keys_override=str(tmp_path), allow_unsigned=True)
    with pytest.raises(UntrustedError, match="not signed"):
        resolve(archive, replace(allowed, require_signatures=True), store)
    assert sound(resolve(archive, allowed, store))


def test_a_signature_comes_along(tmp_path: Path, store: Store) -> None:
    export(tmp_path / "signed.tar", bundle(tmp_path / "signed", b"a signature"))
    assert BundleFiles.open(folder(store, tmp_path / "signed.tar")).signature == b"a signature"


def test_a_newer_signature_in_the_store_is_in_the_folder_too(tmp_path: Path, archive: Path, store: Store) -> None:
    folder(store, archive)
    publish_bundle(store, manifest(), b"newer")
    assert BundleFiles.open(folder(store, archive)).signature == b"newer"


def test_a_missing_archive_says_so(tmp_path: Path, store: Store) -> None:
    with pytest.raises(ArtifactError, match=r"nowhere\.tar: the archive cannot be read \(No such file"):
        folder(store, tmp_path / "nowhere.tar")


@pytest.mark.parametrize("text", [HEX, HEX[:4], DIGEST, DIGEST[7:], DIGEST[7:15], DIGEST[:15].upper()[7:]])
def test_a_bundle_of_the_store_by_key_or_manifest(tmp_path: Path, store: Store, text: str) -> None:
    add_bundle(store, bundle(tmp_path / "bundle"))
    store.publish(key(), {})
    assert sound(folder(store, f"store:{text}"))


def test_a_bundle_of_a_shared_store_by_its_whole_digest(tmp_path: Path) -> None:
    add_bundle(Store(tmp_path / "shared"), bundle(tmp_path / "bundle"))
    store = Store(tmp_path / "store", shared=[tmp_path / "shared"])
    assert sound(folder(store, f"store:{DIGEST}"))


def test_prefixes_that_name_no_bundle(tmp_path: Path, store: Store) -> None:
    for number in range(40):
        publish_bundle(store, manifest(blobs={}, files={}, executables=[], target=str(number)))
    digits = {entry.key.hex[:1] for entry in store.entries()}
    with pytest.raises(ArtifactError, match="too short"):
        find_bundle(store, next(iter(digits)))
    with pytest.raises(ArtifactError, match="no bundle store:0000000000 in"):
        find_bundle(store, "0000000000")
    with pytest.raises(ArtifactError, match="no bundle"):
        find_bundle(store, key().hex)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llmc.artifacts.local.references.SHORTEST_PREFIX", 1)
        with pytest.raises(ArtifactError, match="ambiguous"):
            find_bundle(store, "a")


@pytest.mark.parametrize("version", ["v1", "sha256:" + "a" * 64])
def test_an_image_is_pulled_and_by_digest_once(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    pulled: list[str] = []

    def pull(into: Store, reference: str, *, trust: Any) -> tuple[Any, None]:
        assert isinstance(trust, Anyone)
        pulled.append(reference)
        return add_bundle(into, bundle(tmp_path / "bundle")), None

    monkeypatch.setattr(oci, "pull_bundle", pull)
    reference = f"oci://registry.example/name{'@' if ':' in version else ':'}{version}"
    for _ in range(2):
        assert sound(folder(Store(store.root), reference))
    assert pulled == [reference] * (1 if ":" in version else 2)


def test_a_store_without_room_is_reported(archive: Path, store: Store) -> None:
    store.root.mkdir()
    store.layout.base.touch()
    with pytest.raises(ArtifactError, match="cannot be written"):
        folder(store, archive)


def test_the_folder_notes_when_it_was_used(archive: Path, store: Store) -> None:
    found = folder(store, archive)
    os.utime(found, (1, 1))
    folder(store, archive)
    assert found.stat().st_mtime > 1


def test_opening_a_folder_imports_nothing_of_this(tmp_path: Path) -> None:
    bundle(tmp_path / "bundle")
    script = """
        import sys
        from llmc.runtime.bundle import Bundle
        Bundle.open(sys.argv[1])
        names = ("references", "archives", "oci", "signing", "bundles")
        print([name for name in sys.modules if name.startswith("llmc.artifacts.") and name.split(".")[2] in names])
    """
    assert finish(child(script, tmp_path / "bundle")) == "[]"
