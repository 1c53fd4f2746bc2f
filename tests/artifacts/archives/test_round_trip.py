"""Export and import: what goes in comes out, byte for byte, and nothing else does."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.artifacts.archives.compression import LEVELS, MAGIC, decompress
from llmc.artifacts.archives.reader import import_archive
from llmc.artifacts.archives.writer import bundle_contents, entry_contents, write_archive
from llmc.artifacts.bundle.reader import BundleFiles
from llmc.artifacts.bundle.stored import add_bundle, checkout, read_bundle
from llmc.artifacts.bundle.trust import UntrustedError
from llmc.artifacts.key import Key
from llmc.artifacts.store.entries import Entries, Entry
from llmc.artifacts.store.store import Store
from llmc.errors import ArtifactError, CapacityError, DeviceError, InputError
from llmc.platforms import install_line
from tests.artifacts.archives.helpers import Words, bundle, export_all, export_one, import_bytes, sign, sound
from tests.artifacts.helpers import CONTENT, DIGESTS, Faults, files_below, flip, key, manifest, truncate
from tests.tiers import examples

ZSTD = shutil.which("zstd")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def other(tmp_path: Path) -> Store:
    """A store on another machine."""
    return Store(tmp_path / "other")


def filled(store: Store) -> list[Entry]:
    """Two executables that share a blob, one of them with two, and a bundle."""
    shared, own = store.put_bytes(b"shared" * 400), store.put_bytes(b"")
    store.publish(key(), {"a": shared}, {"seconds": 1.5})
    store.publish(key(batch=8), {"a": shared, "b": own})
    with bundle(store.root.with_name("bundle")) as files:
        add_bundle(store, files)
    return store.entries()


def test_an_archive_is_what_the_grammar_says(tmp_path: Path) -> None:
    assert export_one(bundle(tmp_path / "bundle"), tmp_path / "a.tar") == sound()


def test_a_bundle_comes_back_from_its_archive(tmp_path: Path, store: Store) -> None:
    files = bundle(tmp_path / "bundle", signature := sign(manifest().to_bytes()))
    found = import_bytes(store, export_one(files, tmp_path / "a.tar"))
    size = sum(map(len, CONTENT.values()))
    assert found[1:6] == (1, len(CONTENT), size, len(CONTENT), size)
    assert read_bundle(store, found.entries[0]) == (manifest(), signature)
    made = checkout(store, found.entries[0], tmp_path / "again")
    assert BundleFiles.open(made).verify() == []
    assert {p.name: p.read_bytes() for p in files_below(made)} == {
        p.name: p.read_bytes() for p in files_below(files.folder)
    }


def test_what_tar_unpacks_is_a_bundle_folder(tmp_path: Path) -> None:
    export_one(bundle(tmp_path / "bundle", b"signed"), tmp_path / "a.tar")
    (tmp_path / "out").mkdir()
    subprocess.run(["tar", "xf", tmp_path / "a.tar", "-C", tmp_path / "out"], check=True)
    with BundleFiles.open(tmp_path / "out") as files:
        assert files.verify() == []
        assert (files.manifest, files.signature) == (manifest(), b"signed")
    subprocess.run(["sha256sum", "--quiet", "-c", "manifest.sha256"], cwd=tmp_path / "out", check=True)


def test_a_bundles_archive_depends_on_the_bundle_alone(tmp_path: Path, store: Store) -> None:
    first = export_one(bundle(tmp_path / "bundle"), tmp_path / "first.tar")
    entry = add_bundle(store, bundle(tmp_path / "elsewhere"))
    assert export_one(entry, tmp_path / "second.tar", store) == first
    squeezed = [export_one(entry, tmp_path / f"{name}.tar.zst", store) for name in "ab"]
    assert squeezed[0] == squeezed[1]
    found = import_bytes(Store(tmp_path / "third"), first)
    assert export_one(found.entries[0], tmp_path / "third.tar", Store(tmp_path / "third")) == first


def test_several_bundles_depend_on_themselves_alone_too(tmp_path: Path, store: Store) -> None:
    items = [bundle(tmp_path / "one"), bundle(tmp_path / "two", target="other")]
    write_archive(entry_contents(store, items), tmp_path / "folders.tar")
    entries = [add_bundle(store, item) for item in reversed(items)]
    write_archive(entry_contents(store, entries), tmp_path / "entries.tar")
    assert (tmp_path / "folders.tar").read_bytes() == (tmp_path / "entries.tar").read_bytes()


def test_a_whole_store_comes_back(tmp_path: Path, store: Store, other: Store) -> None:
    entries = filled(store)
    found = import_bytes(other, export_all(store, tmp_path / "a.tar"))
    assert {entry.key for entry in found.entries} == {entry.key for entry in entries}
    assert (found.new_entries, found.blobs) == (3, 7)
    for entry in entries:
        there = other.lookup(entry.key, verify=True)
        assert there is not None and there.outputs == entry.outputs and there.meta == entry.meta
        if entry.key.kind != "bundle":
            assert there.created == entry.created
    assert other.verify().bad == []
    assert export_all(other, tmp_path / "again.tar") == (tmp_path / "a.tar").read_bytes()


def plain(data: bytes) -> bytes:
    return b"".join(decompress(iter([data]))) if data.startswith(MAGIC) else data


NAMES = st.text("abcdefghijkl.", min_size=1, max_size=8)
ENTRIES = st.lists(
    st.tuples(
        st.sampled_from(["executable", "weights", "x" * 64]),
        st.dictionaries(NAMES, st.integers() | st.text(max_size=4) | st.none(), max_size=3),
        st.dictionaries(NAMES, st.binary(max_size=1200), max_size=3),
    ),
    max_size=6,
)


@examples(25)
@given(ENTRIES, st.booleans())
def test_any_store_comes_back(
    tmp_path_factory: pytest.TempPathFactory, found: list[tuple[str, dict[str, object], dict[str, bytes]]], zstd: bool
) -> None:
    folder = tmp_path_factory.mktemp("any")
    store, other = Store(folder / "store"), Store(folder / "other")
    for kind, components, outputs in found:
        made = {name: store.put_bytes(content) for name, content in outputs.items()}
        store.publish(Key(kind, components), made, {"at": 1})  # type: ignore[arg-type]
    data = export_all(store, folder / ("a.tar.zst" if zstd else "a.tar"))
    import_bytes(other, data)
    assert [(e.key, e.outputs, e.meta, e.created) for e in sorted(other.entries(), key=lambda e: e.key.digest)] == [
        (e.key, e.outputs, e.meta, e.created) for e in sorted(store.entries(), key=lambda e: e.key.digest)
    ]
    with tarfile.open(fileobj=io.BytesIO(plain(data))) as tar:
        names = tar.getnames()
    assert names == sorted(set(names), key=lambda name: (not name.startswith("entries/"), name))


def test_a_signature_of_an_entry_travels(tmp_path: Path, store: Store, other: Store) -> None:
    entry = store.publish(key(), {"a": store.put_bytes(b"a")})
    Entries(store.layout).adopt(entry._replace(signature={"payload": "x"}))
    data = export_all(store, tmp_path / "a.tar")
    with pytest.raises(UntrustedError, match="not of this content"):
        import_bytes(other, data)
    assert b'"signature":{"payload":"x"}' in data
    assert other.entries() == []


def test_importing_twice_changes_nothing(tmp_path: Path, store: Store, other: Store) -> None:
    filled(store)
    data = export_all(store, tmp_path / "a.tar")
    import_bytes(other, data)
    before = {path: path.stat().st_ino for path in files_below(other.layout.entries)}
    again = import_bytes(other, data)
    assert (again.new_entries, again.new_blobs, again.new_bytes) == (0, 0, 0)
    assert {path: path.stat().st_ino for path in files_below(other.layout.entries)} == before


def test_what_was_built_here_stays(tmp_path: Path, store: Store, other: Store) -> None:
    store.publish(key(), {"a": store.put_bytes(b"theirs")})
    mine = other.publish(key(), {"a": other.put_bytes(b"mine")})
    found = import_bytes(other, export_all(store, tmp_path / "a.tar"))
    assert found.new_entries == 0
    assert found.entries[0].outputs == mine.outputs


def test_an_import_heals_a_damaged_store(tmp_path: Path, store: Store) -> None:
    entry = add_bundle(store, files := bundle(tmp_path / "bundle"))
    data = export_one(files, tmp_path / "a.tar")
    flip(store.layout.blob(DIGESTS["weights"]))
    assert import_bytes(store, data).new_blobs == 1
    assert store.lookup(entry.key, verify=True) is not None


@pytest.mark.parametrize("name", ["a.tar.zst", "a.tzst"])
def test_a_name_decides_on_zstd_and_the_content_does_when_reading(tmp_path: Path, store: Store, name: str) -> None:
    data = export_one(bundle(tmp_path / "bundle"), tmp_path / name)
    assert data.startswith(b"\x28\xb5\x2f\xfd") and len(data) < len(sound()) / 3
    assert len(import_bytes(store, data).entries) == 1
    if ZSTD:
        assert subprocess.run([ZSTD, "-dc"], input=data, capture_output=True, check=True).stdout == sound()


@pytest.mark.full
@pytest.mark.skipif(ZSTD is None, reason="no zstd: apt-get install zstd")
def test_an_archive_compressed_by_another_program_is_read(tmp_path: Path, store: Store) -> None:
    assert ZSTD is not None
    data = subprocess.run([ZSTD, "-19", "-c"], input=sound(), capture_output=True, check=True).stdout
    assert len(import_bytes(store, data).entries) == 1


def test_levels(tmp_path: Path) -> None:
    files = bundle(tmp_path / "bundle")
    sizes = [len(export_one(files, tmp_path / f"{level}.tzst", level=level)) for level in (LEVELS[0], LEVELS[-1])]
    assert sizes[0] >= sizes[1]
    for level in (0, 20):
        with pytest.raises(InputError, match=f"level {level} is not one of 1 to 19"):
            export_one(files, tmp_path / "a.tzst", level=level)
    with pytest.raises(InputError, match=r"name it \.tar\.zst"):
        export_one(files, tmp_path / "a.tar", level=3)


def test_a_stream_is_written_and_read(tmp_path: Path, store: Store) -> None:
    files = bundle(tmp_path / "bundle")
    for level in (None, 3):
        stream = io.BytesIO()
        done = write_archive(bundle_contents(store, files), stream, level=level)
        assert done.written == len(stream.getvalue()) and done.bytes == len(sound())
        stream.seek(0)
        assert len(import_archive(store, stream, trust=Words(allow_unsigned=True)).entries) == 1


def test_progress_counts_bytes_to_the_end(tmp_path: Path, store: Store) -> None:
    told: list[tuple[int, int]] = []

    def note(done: int, total: int) -> None:
        told.append((done, total))

    path = tmp_path / "a.tar"
    write_archive(bundle_contents(store, bundle(tmp_path / "bundle")), path, progress=note)
    assert told[-1] == (path.stat().st_size, path.stat().st_size) and told == sorted(told)
    told.clear()
    import_archive(store, path, trust=Words(allow_unsigned=True), progress=note)
    assert told[-1] == (path.stat().st_size, path.stat().st_size)


def test_what_means_something_here_only_is_not_exported(tmp_path: Path, store: Store) -> None:
    entry = store.publish(key("local-bench"), {})
    with pytest.raises(ArtifactError, match="this machine only"):
        entry_contents(store, [entry])


def test_an_archive_needs_a_name_that_says_so(tmp_path: Path) -> None:
    for name in ("a.tgz", "a.tar.gz", "a.zst", "a"):
        with pytest.raises(InputError, match=r"name an archive \.tar or"):
            export_one(bundle(tmp_path / "bundle"), tmp_path / name)


@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink])
def test_nothing_is_exported_of_a_damaged_bundle(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    files = bundle(tmp_path / "bundle")
    (tmp_path / "a.tar").write_bytes(b"as it was")
    damage(files.folder / "blobs" / "sha256" / DIGESTS["weights"][7:])
    with pytest.raises(ArtifactError, match="nothing was exported"):
        export_one(files, tmp_path / "a.tar")
    assert (tmp_path / "a.tar").read_bytes() == b"as it was"
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_a_disk_without_room_leaves_the_old_archive(tmp_path: Path) -> None:
    files = bundle(tmp_path / "bundle")
    path = tmp_path / "a.tar"
    path.write_bytes(b"as it was")
    with pytest.MonkeyPatch.context() as patch:
        Faults(patch, tmp_path).inject("write", 28, after=3)
        with pytest.raises(CapacityError, match="choose another place for the archive"):
            export_one(files, path)
    assert path.read_bytes() == b"as it was"
    assert [item.name for item in tmp_path.glob(".*")] == []


def test_a_full_device_is_one_error(tmp_path: Path, store: Store) -> None:
    with Path("/dev/full").open("wb", buffering=0) as full, pytest.raises(CapacityError, match="standard output"):
        write_archive(bundle_contents(store, bundle(tmp_path / "bundle")), full)


# Signatures


def test_a_wrong_signature_is_an_error_even_where_none_is_needed(tmp_path: Path, store: Store) -> None:
    data = export_one(bundle(tmp_path / "bundle", sign(b"another")), tmp_path / "a.tar")
    with pytest.raises(UntrustedError, match="not of this content"):
        import_bytes(store, data)
    assert store.entries() == [] and store.usage().blobs == 0, "told before a blob was read"


def test_an_unknown_signer_is_enough_unless_a_signature_is_required(tmp_path: Path, store: Store) -> None:
    data = export_one(bundle(tmp_path / "bundle", sign(manifest().to_bytes(), "stranger")), tmp_path / "a.tar")
    with pytest.raises(UntrustedError, match="signed by a key that is not trusted here"):
        import_bytes(store, data, required=True)
    assert store.entries() == []
    assert len(import_bytes(store, data).entries) == 1


def test_a_required_signature_is_required_of_portable_code_too(tmp_path: Path, store: Store) -> None:
    files = bundle(tmp_path / "bundle", executables=[])
    with pytest.raises(UntrustedError, match="not signed, and a signature is required"):
        import_bytes(store, export_one(files, tmp_path / "a.tar"), required=True)
    store.publish(key(), {})
    with pytest.raises(UntrustedError, match=f"executable {key().short}: not signed"):
        import_bytes(Store(tmp_path / "other"), export_all(store, tmp_path / "b.tar"), required=True)


def test_a_signed_bundle_passes_alone_and_among_others(tmp_path: Path, store: Store) -> None:
    files = bundle(tmp_path / "bundle", sign(manifest().to_bytes()))
    import_bytes(store, export_one(files, tmp_path / "a.tar"), required=True)
    data = export_all(store, tmp_path / "b.tar")
    other = Store(tmp_path / "other")
    assert read_bundle(other, import_bytes(other, data, required=True).entries[0])[1] == files.signature


def test_a_bundle_among_several_with_a_wrong_signature_is_refused(tmp_path: Path, store: Store, other: Store) -> None:
    store.publish(key(), {"a": store.put_bytes(b"a")})
    add_bundle(store, bundle(tmp_path / "bundle", sign(b"another")))
    with pytest.raises(UntrustedError, match="not of this content"):
        import_bytes(other, export_all(store, tmp_path / "a.tar"))
    assert other.entries() == [], "the executable is not published either"


def test_a_signature_in_the_store_gives_way_to_a_trusted_one_only(tmp_path: Path, store: Store) -> None:
    content = manifest().to_bytes()
    plain, strange, good = (
        export_one(bundle(tmp_path / name, signature), tmp_path / f"{name}.tar")
        for name, signature in (("plain", None), ("strange", sign(content, "stranger")), ("good", sign(content)))
    )
    signatures = []
    for data in (plain, strange, plain, good, strange, plain):
        entry = import_bytes(store, data).entries[0]
        signatures.append((read_bundle(store, entry)[1] or b"none:").partition(b":")[0].decode())
    assert signatures == ["none", "stranger", "stranger", "friend", "friend", "friend"]


def test_without_zstd_the_line_that_installs_it_is_named(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = bundle(tmp_path / "bundle")
    data = export_one(files, tmp_path / "a.tar.zst")
    name = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
    monkeypatch.delattr(name)
    monkeypatch.setitem(sys.modules, name, None)
    for attempt in (lambda: import_bytes(store, data), lambda: export_one(files, tmp_path / "b.tar.zst")):
        with pytest.raises(DeviceError, match=rf"{re.escape(install_line('archive'))}"):
            attempt()
    assert not (tmp_path / "b.tar.zst").exists()
    assert len(import_bytes(store, sound()).entries) == 1
