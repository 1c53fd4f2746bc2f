from __future__ import annotations

import json
import os
import shutil
import stat
import time
from pathlib import Path

import pytest

from llmc.artifacts.bundle import reader as module
from llmc.artifacts.bundle.reader import BundleFiles, blob_path
from llmc.artifacts.bundle.writer import write_bundle
from llmc.artifacts.store.store import Store
from llmc.artifacts.verified_files import signature
from llmc.errors import ArtifactError, CapacityError
from tests.artifacts.helpers import CONTENT, DIGESTS, Faults, files_below, flip, manifest, sources, truncate


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "bundle", manifest(), sources(tmp_path / "store"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's own cache."""
    monkeypatch.setenv("LLMC_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def refuse(path: Path) -> str:
    raise AssertionError(f"{path} was hashed")


# Writing


def test_a_bundle_is_a_manifest_and_one_flat_folder_of_blobs(bundle: Path) -> None:
    names = {str(path.relative_to(bundle)) for path in files_below(bundle)}
    assert names == {"manifest.json", "manifest.sha256", *(f"blobs/sha256/{digest[7:]}" for digest in DIGESTS.values())}
    assert (bundle / "manifest.json").read_bytes() == manifest().to_bytes()
    assert stat.S_IMODE(blob_path(bundle, DIGESTS["decode"]).stat().st_mode) == 0o444
    assert stat.S_IMODE(bundle.stat().st_mode) == 0o777 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_blobs_of_a_store_are_linked_not_copied(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    blobs = {digest: store.path(store.put_bytes(CONTENT[name])) for name, digest in DIGESTS.items()}
    built = write_bundle(tmp_path / "bundle", manifest(), blobs)
    for digest, path in blobs.items():
        assert blob_path(built, digest).stat().st_ino == path.stat().st_ino
    shutil.rmtree(built)
    assert store.verify().bad == []


def test_files_that_can_be_written_are_copied(tmp_path: Path) -> None:
    found = sources(tmp_path / "model", mode=0o644)
    built = write_bundle(tmp_path / "bundle", manifest(), found)
    found[DIGESTS["weights"]].write_bytes(b"v" * 5000)
    assert BundleFiles.open(built).read("weights.bin") == CONTENT["weights"]
    assert stat.S_IMODE(found[DIGESTS["weights"]].stat().st_mode) == 0o644


def test_links_are_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_link(*_: object, **__: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", no_link)
    built = write_bundle(tmp_path / "bundle", manifest(), sources(tmp_path / "store"))
    assert BundleFiles.open(built).verify() == []


def test_a_bundle_replaces_a_bundle(tmp_path: Path, bundle: Path) -> None:
    other = manifest(device="other")
    assert write_bundle(bundle, other, sources(tmp_path / "store")) == bundle
    assert BundleFiles.open(bundle).manifest == other
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "store"]


def test_the_same_bundle_is_left_alone(tmp_path: Path, bundle: Path) -> None:
    inode = bundle.stat().st_ino
    write_bundle(bundle, manifest(), sources(tmp_path / "store"))
    assert bundle.stat().st_ino == inode


@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink])
def test_writing_a_damaged_bundle_again_heals_it(tmp_path: Path, damage) -> None:  # type: ignore[no-untyped-def]
    found = sources(tmp_path / "model", mode=0o644)
    built = write_bundle(tmp_path / "bundle", manifest(), found)
    for path in (blob_path(built, DIGESTS["weights"]), built / "manifest.json"):
        damage(path)
        write_bundle(built, manifest(), found)
        assert BundleFiles.open(built).verify() == []


def test_an_empty_folder_may_become_a_bundle(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    write_bundle(tmp_path / "deep", manifest(), sources(tmp_path / "store"))
    write_bundle(tmp_path / "not" / "yet" / "there", manifest(), sources(tmp_path / "store"))
    assert BundleFiles.open(tmp_path / "not" / "yet" / "there").verify() == []


def test_a_link_to_a_bundle_is_followed(tmp_path: Path, bundle: Path) -> None:
    (tmp_path / "current").symlink_to(bundle)
    write_bundle(tmp_path / "current", manifest(device="other"), sources(tmp_path / "store"))
    assert (tmp_path / "current").is_symlink()
    assert BundleFiles.open(bundle).manifest.device == "other"


def make_file(path: Path) -> None:
    path.write_text("x")


def make_home(path: Path) -> None:
    path.mkdir()
    (path / "thesis.txt").write_text("x")


def make_app(path: Path) -> None:
    path.mkdir()
    (path / "manifest.json").write_text('{"name": "a web app"}')


def make_bundle_with_notes(path: Path) -> None:
    write_bundle(path, manifest(), sources(path.parent / "store"))
    (path / "notes.txt").write_text("x")


def make_bundle_in_git(path: Path) -> None:
    write_bundle(path, manifest(), sources(path.parent / "store"))
    (path / ".git").mkdir()


def test_what_llmc_leaves_in_a_bundle_does_not_keep_it_from_being_replaced(tmp_path: Path, bundle: Path) -> None:
    with BundleFiles.open(bundle) as files:
        files.path("weights.bin")
    (bundle / "0123456789abcdef01234567").write_text("stamps that a killed process was writing")
    (bundle / "manifest.sig").write_text("x")
    write_bundle(bundle, manifest(device="other"), sources(tmp_path / "store"))
    assert sorted(path.name for path in bundle.iterdir()) == ["blobs", "manifest.json", "manifest.sha256"]


@pytest.mark.parametrize("make", [make_file, make_home, make_app, make_bundle_with_notes, make_bundle_in_git])
def test_anything_else_is_not_replaced(tmp_path: Path, make) -> None:  # type: ignore[no-untyped-def]
    found = sources(tmp_path / "store")
    make(tmp_path / "dest")
    before = {path: path.read_bytes() for path in files_below(tmp_path)}
    with pytest.raises(ArtifactError, match=str(tmp_path / "dest")):
        write_bundle(tmp_path / "dest", manifest(device="other"), found)
    assert {path: path.read_bytes() for path in files_below(tmp_path)} == before


def test_a_blob_without_a_source_is_named(tmp_path: Path) -> None:
    found = sources(tmp_path / "store")
    del found[DIGESTS["weights"]]
    with pytest.raises(ArtifactError, match=r"weights\.bin"):
        write_bundle(tmp_path / "bundle", manifest(), found)
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink])
def test_a_source_that_is_not_its_blob_is_refused(tmp_path: Path, damage) -> None:  # type: ignore[no-untyped-def]
    found = sources(tmp_path / "store", mode=0o644)
    damage(found[DIGESTS["weights"]])
    with pytest.raises(ArtifactError, match=DIGESTS["weights"]):
        write_bundle(tmp_path / "bundle", manifest(), found)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


# Reading


def test_files_are_read_by_name_or_digest(bundle: Path) -> None:
    with BundleFiles.open(bundle) as files:
        assert files.manifest == manifest()
        assert files.read("tokenizer.json") == CONTENT["tokenizer"]
        assert files.read(DIGESTS["decode"]) == CONTENT["decode"]
        assert files.path("weights.bin") == blob_path(bundle, DIGESTS["weights"])
        assert files.path(DIGESTS["weights"]).read_bytes() == CONTENT["weights"]


@pytest.mark.parametrize("name", ["other.json", "../manifest.json", "", "sha256:" + "0" * 64])
def test_what_the_manifest_does_not_list_is_refused(bundle: Path, name: str) -> None:
    with pytest.raises(ArtifactError, match=r"tokenizer\.json, weights\.bin"):
        BundleFiles.open(bundle).read(name)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (flip, "altered: its content has digest sha256:"),
        (truncate, "has 4999 bytes, expected 5000"),
        (Path.unlink, "is missing"),
    ],
)
def test_a_damaged_blob_is_named_with_its_use_and_the_remedy(bundle: Path, damage, problem: str) -> None:  # type: ignore[no-untyped-def]
    damage(blob_path(bundle, DIGESTS["weights"]))
    files = BundleFiles.open(bundle)
    for get in (files.path, files.read):
        with pytest.raises(ArtifactError, match=problem) as caught:
            get("weights.bin")
        message = str(caught.value)
        assert "weights.bin" in message
        assert DIGESTS["weights"] in message
        assert f"llmc compile MODEL --device cpu -o {bundle}" in message
    assert files.read("tokenizer.json") == CONTENT["tokenizer"], "the rest can be read"
    assert len(files.verify()) == 1


def test_a_damaged_executable_is_named_by_its_bucket(bundle: Path) -> None:
    flip(blob_path(bundle, DIGESTS["decode"]))
    with pytest.raises(ArtifactError, match="executable decode batch=4 context=2048"):
        BundleFiles.open(bundle).path(DIGESTS["decode"])


def test_a_folder_in_the_place_of_a_blob_is_an_error(bundle: Path) -> None:
    path = blob_path(bundle, DIGESTS["decode"])
    path.unlink()
    path.mkdir()
    with pytest.raises(ArtifactError, match="not a regular file"):
        BundleFiles.open(bundle).path(DIGESTS["decode"])


def test_what_was_verified_is_not_hashed_at_the_next_start(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    time.sleep(0.03)
    with BundleFiles.open(bundle) as files:
        for digest in DIGESTS.values():
            files.path(digest)
    monkeypatch.setattr(module, "digest_file", refuse)
    files = BundleFiles.open(bundle)
    for digest in DIGESTS.values():
        files.path(digest)
    monkeypatch.undo()
    before = blob_path(bundle, DIGESTS["weights"]).stat()
    flip(blob_path(bundle, DIGESTS["weights"]))
    os.utime(blob_path(bundle, DIGESTS["weights"]), ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(ArtifactError, match="altered"):
        BundleFiles.open(bundle).path("weights.bin")


def test_verify_reads_everything_whatever_the_stamps_say(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmc.artifacts.verified_files import VerifiedFiles

    flip(blob_path(bundle, DIGESTS["weights"]))
    monkeypatch.setattr(VerifiedFiles, "verified", lambda *_: True)
    seen: list[int] = []
    errors = BundleFiles.open(bundle).verify(lambda digest, size: seen.append(size))
    assert len(errors) == 1
    assert "weights.bin" in errors[0]
    assert sum(seen) == manifest().size


def test_big_files_are_stamped_at_once(bundle: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAVE_STAMPS_FROM", 5000)
    time.sleep(0.03)
    BundleFiles.open(bundle).path("weights.bin")
    (table,) = (cache / "stamps").iterdir()
    assert list(json.loads(table.read_bytes())["files"]) == [str(blob_path(bundle, DIGESTS["weights"]))]


def test_stamps_are_not_in_the_bundle_and_outlive_the_process(
    bundle: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    time.sleep(0.03)
    with BundleFiles.open(bundle) as files:
        files.path("weights.bin")
    assert not (bundle / ".stamps.json").exists()
    monkeypatch.setattr(module, "digest_file", refuse)
    BundleFiles.open(bundle).path("weights.bin")


def test_whoever_may_alter_a_file_of_a_bundle_cannot_vouch_for_it(bundle: Path, cache: Path) -> None:
    """With the bundle's manifest signed, a stamp inside it let an altered library run."""
    path = blob_path(bundle, DIGESTS["weights"])
    flip(path)
    path.chmod(0o444)
    time.sleep(0.03)
    seen = signature(path.stat())
    table = {"schema": 1, "files": {str(path): [*seen, DIGESTS["weights"]]}}
    (bundle / ".stamps.json").write_text(json.dumps(table))
    with pytest.raises(ArtifactError, match="was altered"):
        BundleFiles.open(bundle).path("weights.bin")


def test_opening_reads_the_manifest_only(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(bundle / "blobs")
    assert BundleFiles.open(bundle).manifest.device == "cpu"


def test_a_manifest_file_is_not_a_bundle_folder(bundle: Path) -> None:
    with pytest.raises(ArtifactError, match="name the folder"):
        BundleFiles.open(bundle / "manifest.json")


def test_moving_a_bundle_keeps_it_whole(bundle: Path, tmp_path: Path) -> None:
    bundle.rename(tmp_path / "moved")
    assert BundleFiles.open(tmp_path / "moved").verify() == []


@pytest.mark.parametrize("call", ["write", "fsync", "rename", "mkdir", "open"])
def test_a_full_disk_leaves_the_old_bundle(
    tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    found = sources(tmp_path / "store", mode=0o644)
    Faults(monkeypatch, tmp_path / ".bundle").inject(call, 28)
    with pytest.raises(CapacityError, match=f"{manifest().size} bytes were needed"):
        write_bundle(bundle, manifest(device="other"), found)
    monkeypatch.undo()
    assert BundleFiles.open(bundle).manifest == manifest()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "store"]


def test_code_is_refused_to_a_loader_unless_the_bundle_counts_as_native(tmp_path: Path, bundle: Path) -> None:
    BundleFiles.open(bundle).require_native("kernels")
    executables = [{**item, "state": "portable"} for item in manifest().to_dict()["executables"]]
    files = BundleFiles.open(write_bundle(bundle, manifest(executables=executables), sources(tmp_path / "model")))
    for load in (files.require_native, files.within):
        with pytest.raises(ArtifactError, match=r"tokenizer.json is native code in a bundle that counts as portable"):
            load("tokenizer.json")
