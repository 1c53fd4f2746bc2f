from __future__ import annotations

import errno
import logging
import os
import pickle
import stat
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.artifacts.digest import Blob, digest_bytes
from llmc.artifacts.store.blobs import BlobMissingError
from llmc.artifacts.store.store import Store
from llmc.artifacts.store.workspace import Workspace
from llmc.errors import ArtifactError
from tests.artifacts.helpers import files_below, flip, key, overwrite, truncate
from tests.tiers import examples


def build_graph(space: Workspace) -> Mapping[str, Blob]:
    space.meta["seconds"] = 1.5
    (space.folder / "graph.onnx").write_bytes(b"graph")
    return {
        "graph": space.put_file(space.folder / "graph.onnx"),
        "weights": space.put_bytes(b"weights" * 100),
    }


def never(space: Workspace) -> Mapping[str, Blob]:
    raise AssertionError("built although it is stored")


# Blobs


def test_what_is_put_is_got(store: Store) -> None:
    blob = store.put_bytes(b"graph")
    assert blob == (digest_bytes(b"graph"), 5)
    assert store.get_bytes(blob.digest) == b"graph"
    assert store.path(blob).read_bytes() == b"graph"
    assert store.path(blob.digest) == store.path(blob)


def test_the_layout_is_the_documented_one(store: Store) -> None:
    blob = store.put_bytes(b"graph")
    entry = store.publish(key(), {"graph": blob})
    name = blob.digest.removeprefix("sha256:")
    assert store.path(blob) == store.root / "v1/blobs/sha256" / name[:2] / name[2:]
    assert (store.root / "v1/entries/executable" / f"{entry.key.hex}.json").is_file()
    assert len(files_below(store.root / "v1/blobs")) == len(files_below(store.root / "v1/entries")) == 1


def test_blobs_are_read_only_files(store: Store) -> None:
    assert stat.S_IMODE(store.path(store.put_bytes(b"graph")).stat().st_mode) == 0o444


def test_equal_content_is_stored_once(store: Store, tmp_path: Path) -> None:
    first = store.path(store.put_bytes(b"graph"))
    before = first.stat()
    (tmp_path / "copy").write_bytes(b"graph")
    store.put_bytes(b"graph")
    store.put_file(tmp_path / "copy")
    assert first.stat().st_ino == before.st_ino
    assert files_below(store.root / "v1/blobs") == [first]


def test_a_file_is_copied_or_moved(store: Store, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"one")
    assert store.get_bytes(store.put_file(source).digest) == b"one"
    assert source.exists()
    source.write_bytes(b"two")
    inode = source.stat().st_ino
    moved = store.put_file(source, move=True)
    assert not source.exists()
    assert store.path(moved).stat().st_ino == inode


def test_moving_a_file_that_is_stored_already_consumes_it(store: Store, tmp_path: Path) -> None:
    store.put_bytes(b"one")
    (tmp_path / "source").write_bytes(b"one")
    store.put_file(tmp_path / "source", move=True)
    assert not (tmp_path / "source").exists()


def test_a_file_with_further_names_is_copied_so_that_nobody_can_write_into_the_store(
    store: Store, tmp_path: Path
) -> None:
    source, link, other = tmp_path / "source", tmp_path / "link", tmp_path / "other"
    source.write_bytes(b"one")
    link.symlink_to(source)
    other.hardlink_to(source)
    blob = store.put_file(link, move=True)
    assert source.read_bytes() == b"one"
    assert not link.is_symlink()
    store.put_file(source, move=True)
    other.write_bytes(b"two")
    assert store.get_bytes(blob.digest) == b"one"


@pytest.mark.parametrize("name", ["missing", "."])
def test_what_is_not_a_readable_file_is_not_stored(store: Store, tmp_path: Path, name: str) -> None:
    with pytest.raises(ArtifactError, match=str(tmp_path)):
        store.put_file(tmp_path / name)
    assert files_below(tmp_path) == []


def test_a_stream_is_published_when_its_block_ends(store: Store) -> None:
    with store.writer() as stream:
        stream.write(b"gra")
        stream.write(memoryview(b"ph"))
        assert stream.tell() == 5
        assert files_below(store.root / "v1/blobs") == []
    assert stream.blob == store.put_bytes(b"graph")


def test_a_stream_that_fails_leaves_nothing(store: Store) -> None:
    with pytest.raises(FileNotFoundError), store.writer() as stream:
        stream.write(b"gra")
        raise FileNotFoundError("the builder's own error is passed on as it is")
    assert stream.blob is None
    assert files_below(store.root) == []


def test_a_blob_that_is_not_there_is_an_artifact_error(store: Store) -> None:
    absent = Blob(digest_bytes(b"absent"), 6)
    assert not store.has(absent)
    for get in (lambda: store.get_bytes(absent.digest), lambda: store.path(absent)):
        with pytest.raises(BlobMissingError, match=absent.digest):
            get()
    assert not store.root.exists(), "reading creates nothing"


@pytest.mark.parametrize("text", ["", "../../etc/passwd", "sha256:../../x"])
def test_only_digests_name_blobs(store: Store, text: str) -> None:
    with pytest.raises(ValueError, match="not a digest"):
        store.get_bytes(text)


@examples(25)
@given(st.lists(st.binary(max_size=64), max_size=5))
def test_any_content_survives(tmp_path_factory: pytest.TempPathFactory, contents: list[bytes]) -> None:
    store = Store(tmp_path_factory.mktemp("store"))
    blobs = [store.put_bytes(data) for data in contents]
    assert [Store(store.root).get_bytes(blob.digest) for blob in blobs] == contents
    assert store.usage().blobs == len(set(contents))


# Damage to blobs


@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink])
def test_a_damaged_blob_is_a_miss_is_put_aside_and_heals(store: Store, damage) -> None:  # type: ignore[no-untyped-def]
    entry, _ = store.get_or_build(key(), build_graph)
    damage(store.path(entry.outputs["weights"]))
    fresh = Store(store.root)
    with pytest.raises(BlobMissingError):
        fresh.path(entry.outputs["weights"])
    assert not store.has(entry.outputs["weights"])
    healed, hit = fresh.get_or_build(key(), build_graph)
    assert not hit
    assert fresh.path(healed.outputs["weights"]).read_bytes() == b"weights" * 100
    assert fresh.get_or_build(key(), never)[1]
    if damage is not Path.unlink:
        assert len(files_below(store.root / "v1/quarantine")) == 2, "the blob, and the entry that named it"


@pytest.mark.parametrize("damage", [flip, truncate])
def test_get_or_build_never_returns_a_damaged_output(store: Store, damage) -> None:  # type: ignore[no-untyped-def]
    entry, _ = store.get_or_build(key(), build_graph)
    damage(store.path(entry.outputs["graph"]))
    _, hit = Store(store.root).get_or_build(key(), build_graph)
    assert not hit


def test_storing_over_a_damaged_blob_heals_it(store: Store, tmp_path: Path) -> None:
    for put in (store.put_bytes, lambda data: store.put_file(_file(tmp_path, data))):
        blob = put(b"graph")
        flip(store.path(blob))
        put(b"graph")
        assert store.get_bytes(blob.digest) == b"graph"


def _file(folder: Path, data: bytes) -> Path:
    (folder / "file").write_bytes(data)
    return folder / "file"


def test_get_bytes_verifies_what_it_read(store: Store) -> None:
    blob = store.put_bytes(b"graph")
    flip(store.path(blob))
    with pytest.raises(BlobMissingError):
        store.get_bytes(blob.digest)
    assert not store.has(blob)
    assert store.counters["corrupt"] == 1


def test_a_folder_in_the_place_of_a_blob_is_a_miss(store: Store) -> None:
    path = store.path(store.put_bytes(b"graph"))
    path.unlink()
    path.mkdir()
    with pytest.raises(BlobMissingError):
        store.path(digest_bytes(b"graph"))
    assert store.get_bytes(store.put_bytes(b"graph").digest) == b"graph"


def test_the_size_is_checked_even_without_the_digest(store: Store) -> None:
    blob = store.put_bytes(b"graph")
    truncate(store.path(blob))
    with pytest.raises(BlobMissingError):
        store.path(blob, verify=False)


def test_a_verified_blob_is_not_hashed_again_until_it_is_touched(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmc.artifacts.store import blobs

    blob = store.put_bytes(b"graph")
    time.sleep(0.03)
    store.path(blob)
    monkeypatch.setattr(blobs, "digest_file", _refuse)
    store.path(blob)
    monkeypatch.undo()
    flip(store.path(blob))
    with pytest.raises(BlobMissingError):
        store.path(blob)


def test_a_big_blob_is_not_hashed_again_by_the_next_process(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmc.artifacts.store import blobs

    monkeypatch.setattr(blobs, "SAVE_STAMPS_FROM", 5)
    blob = store.put_bytes(b"graph")
    time.sleep(0.03)
    store.path(blob)
    monkeypatch.setattr(blobs, "digest_file", _refuse)
    assert Store(store.root).path(blob).read_bytes() == b"graph"


def _refuse(path: Path) -> str:
    raise AssertionError(f"{path} was hashed")


# Entries


def test_a_key_is_built_once(store: Store) -> None:
    built, hit = store.get_or_build(key(), build_graph)
    assert not hit
    found, hit = Store(store.root).get_or_build(key(), never)
    assert hit
    assert (found.key, found.outputs, found.meta) == (built.key, built.outputs, {"seconds": 1.5})
    assert store.lookup(key()) is not None
    assert store.lookup(key(batch=8)) is None
    assert store.counters == {"hits": 1, "misses": 2, "fetched": 0, "corrupt": 0}


def test_a_build_that_fails_leaves_nothing_and_can_be_tried_again(store: Store) -> None:
    def fail(space: Workspace) -> Mapping[str, Blob]:
        (space.folder / "partial").write_bytes(b"x")
        raise RuntimeError("compiler crashed")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="compiler crashed"):
            store.get_or_build(key(), fail)
    assert [path for path in files_below(store.root) if path.parent.name != "locks"] == []
    assert list((store.root / "v1/tmp").iterdir()) == []
    assert not store.get_or_build(key(), build_graph)[1]


def test_an_output_that_was_not_stored_is_not_published(store: Store) -> None:
    absent = {"graph": Blob(digest_bytes(b"absent"), 6)}
    with pytest.raises(BlobMissingError, match="graph"):
        store.publish(key(), absent)
    with pytest.raises(BlobMissingError, match="graph"):
        store.get_or_build(key(), lambda space: absent)
    assert store.lookup(key()) is None


def test_meta_is_json(store: Store) -> None:
    with pytest.raises(TypeError):
        store.publish(key(), {}, {"x": object()})
    with pytest.raises(ValueError, match="JSON"):
        store.publish(key(), {}, {"x": float("nan")})
    assert store.entries() == []


def swap_with_another_key(path: Path) -> None:
    store = Store(path.parents[3])
    store.publish(key(batch=99), {})
    overwrite(path, (path.parent / f"{key(batch=99).hex}.json").read_bytes())


DAMAGES = {
    "flip": flip,
    "truncate": truncate,
    "empty": lambda path: overwrite(path, b""),
    "not JSON": lambda path: overwrite(path, b"\x80\x04pickle"),
    "not an object": lambda path: overwrite(path, b"[]"),
    "nested": lambda path: overwrite(path, b"[" * 100_000),
    "another schema": lambda path: overwrite(path, path.read_bytes().replace(b'"schema":1', b'"schema":2')),
    "altered": lambda path: overwrite(path, path.read_bytes().replace(b"1.31.1", b"1.30.0")),
    "another key": swap_with_another_key,
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_entry_is_a_miss_is_put_aside_and_heals(store: Store, name: str) -> None:
    store.get_or_build(key(), build_graph)
    path = store.root / "v1/entries/executable" / f"{key().hex}.json"
    DAMAGES[name](path)
    fresh = Store(store.root)
    assert fresh.lookup(key()) is None
    assert fresh.counters["corrupt"] == 1
    assert not path.exists()
    assert not fresh.get_or_build(key(), build_graph)[1]
    assert fresh.get_or_build(key(), never)[1]


@examples(40)
@given(st.floats(0, 1, exclude_max=True), st.integers(0, 255))
def test_no_change_to_an_entry_is_believed(tmp_path_factory: pytest.TempPathFactory, where: float, byte: int) -> None:
    store = Store(tmp_path_factory.mktemp("store"))
    entry = store.publish(key(), {"graph": store.put_bytes(b"graph")}, {"seconds": 1})
    path = store.root / "v1/entries/executable" / f"{key().hex}.json"
    raw = bytearray(path.read_bytes())
    raw[int(where * len(raw))] = byte
    overwrite(path, bytes(raw))
    found = store.lookup(key())
    assert found is None or (found.key, found.outputs, found.meta) == (entry.key, entry.outputs, entry.meta)


def test_an_entry_is_marked_as_used(store: Store) -> None:
    store.publish(key(), {})
    path = store.root / "v1/entries/executable" / f"{key().hex}.json"
    import os

    os.utime(path, (0, 0))
    store.lookup(key())
    assert store.entries()[0].used > time.time() - 60


def test_a_miss_says_which_component_differs(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "llmc.artifacts")
    store.lookup(key())
    assert "nothing of kind executable is stored" in caplog.text
    old = key(**{"toolchain.onnxruntime": "1.30.0"})
    store.publish(old, {})
    store.publish(key(phase="prefill", batch=1), {})
    store.lookup(key())
    assert "toolchain.onnxruntime: 1.30.0 → 1.31.1" in caplog.text
    near = store.nearest(key())
    assert near is not None
    assert near[0].key == old
    assert near[1] == [("toolchain.onnxruntime", "1.31.1", "1.30.0")]


def test_looking_for_the_nearest_reads_a_bounded_number_of_entries(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llmc.artifacts.store import entries

    for batch in range(8):
        store.publish(key(batch=100 + batch), {})
    monkeypatch.setattr(entries, "NEAREST_CANDIDATES", 3)
    reads: list[Path] = []
    load = entries.Entries.load
    monkeypatch.setattr(
        entries.Entries, "load", lambda self, path, digest: reads.append(path) or load(self, path, digest)
    )
    assert store.nearest(key()) is not None
    assert len(reads) == 3


def test_find_takes_the_first_digits_of_a_key(store: Store) -> None:
    entry = store.publish(key(), {})
    assert store.find(entry.key.short).key == key()
    assert store.find(entry.key.digest).key == key()
    with pytest.raises(ArtifactError, match="no entry"):
        store.find("0000000000000")
    with pytest.raises(ArtifactError, match="too short"):
        store.find("")


def test_find_refuses_what_is_ambiguous(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmc.artifacts.store import store as module

    monkeypatch.setattr(module, "SHORTEST_PREFIX", 0)
    store.publish(key(batch=1), {})
    store.publish(key(batch=2), {})
    with pytest.raises(ArtifactError, match="ambiguous"):
        store.find("")


# Care


def test_verify_finds_all_damage_even_where_stamps_hold(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmc.artifacts.verified_files import VerifiedFiles

    entry, _ = store.get_or_build(key(), build_graph)
    store.publish(key(batch=8), {"other": store.put_bytes(b"other")})
    assert store.verify().bad == []
    flip(store.path(entry.outputs["weights"]))
    monkeypatch.setattr(VerifiedFiles, "verified", lambda *_: True)
    seen: list[int] = []
    report = store.verify(lambda digest, size: seen.append(size))
    assert [bad.name for bad in report.bad] == [
        entry.outputs["weights"].digest,
        f"executable/{entry.key.short}",
    ]
    assert (report.blobs, report.entries, sum(seen)) == (3, 2, report.bytes)
    assert store.verify().bad == []


def test_verify_sweeps_what_crashed_processes_left_long_ago(store: Store) -> None:
    import os

    temporaries = store.root / "v1/tmp"
    temporaries.mkdir(parents=True)
    for name in ("old", "new"):
        (temporaries / name).write_bytes(b"partial")
        (temporaries / f"{name}-folder").mkdir()
    for name in ("old", "old-folder"):
        os.utime(temporaries / name, (0, 0))
    store.verify()
    assert {path.name for path in temporaries.iterdir()} == {"new", "new-folder"}


def test_usage_adds_up(store: Store) -> None:
    assert store.usage() == (0, 0, 0, 0, 0, 0)
    store.get_or_build(key(), build_graph)
    usage = store.usage()
    assert (usage.blobs, usage.blob_bytes, usage.entries, usage.other_bytes) == (2, 705, 1, 0)
    assert usage.entry_bytes > 100
    assert usage.total == 705 + usage.entry_bytes


def test_strangers_in_the_folders_are_passed_over(store: Store) -> None:
    store.get_or_build(key(), build_graph)
    strangers = ("blobs/sha256/zzz", "blobs/sha256/aa/notes", "entries/readme", "entries/executable/x.json")
    for path in (f"v1/{name}" for name in strangers):
        (store.root / path).parent.mkdir(parents=True, exist_ok=True)
        (store.root / path).write_text("x")
    assert store.verify().bad == []
    assert len(store.entries()) == 1


def test_a_store_of_another_schema_is_left_alone(store: Store) -> None:
    (store.root / "v0/entries").mkdir(parents=True)
    (store.root / "v0/entries/x").write_text("old")
    (store.root / "v2").mkdir()
    store.get_or_build(key(), build_graph)
    store.verify()
    assert (store.root / "v0/entries/x").read_text() == "old"


def test_a_store_can_be_handed_to_a_worker(store: Store, tmp_path: Path) -> None:
    other = pickle.loads(pickle.dumps(Store(store.root, overflow=tmp_path / "overflow")))
    store.get_or_build(key(), build_graph)
    assert other.get_or_build(key(), never)[1]


def test_an_entry_whose_blob_cannot_be_read_for_now_stays(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = store.publish(key(), {"graph": store.put_bytes(b"graph")})
    path = store.path(entry.outputs["graph"])
    real = Path.stat

    def failing(self: Path, **options: bool) -> os.stat_result:
        if self == path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(self, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", failing)
        assert store.lookup(key()) is None
    assert store.lookup(key()) is not None, "the disk answers again"
