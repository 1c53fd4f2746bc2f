"""An image layout as one tar file: what is written, what of other tools' files is read, and what is refused."""

from __future__ import annotations

import errno
import io
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.artifacts import atomic_write
from llmc.artifacts.atomic_write import UnwritableError
from llmc.artifacts.bundle.manifest import Manifest
from llmc.artifacts.bundle.stored import read_bundle
from llmc.artifacts.bundle.trust import UntrustedError
from llmc.artifacts.gc import collect
from llmc.artifacts.oci import archive, pull_bundle
from llmc.artifacts.oci.archive import export_images, import_archive
from llmc.artifacts.store.entries import Entry
from llmc.artifacts.store.store import Store
from llmc.errors import ArtifactError, CapacityError, InputError
from tests.artifacts.helpers import child, files_below, finish, flip, key
from tests.artifacts.oci.helpers import OTHERS, Anyone, Nobody, make_bundle

SMALL = {"weights": b"small weights", **OTHERS}


@pytest.fixture
def other(tmp_path: Path) -> Store:
    return Store(tmp_path / "other")


def small(store: Store, **changes: Any) -> Entry:
    return make_bundle(store, **{**SMALL, **changes})


def exported(store: Store, *entries: Entry) -> bytes:
    path = store.root.with_name("made.tar")
    export_images(store, entries, path)
    return path.read_bytes()


def imported(store: Store, data: bytes, **named: Any) -> list[Entry]:
    path = store.root.with_name(f"{store.root.name}.tar")
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return import_archive(store, path, **{"trust": Anyone(), **named})[0]


def refused(store: Store, data: bytes) -> str:
    with pytest.raises(ArtifactError) as caught:
        imported(store, data)
    message = str(caught.value)
    assert message.startswith(f"{store.root}.tar: ") and "\n" not in message
    assert store.entries() == []
    return message


def members(data: bytes) -> list[tuple[tarfile.TarInfo, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(data)) as file:
        return [(member, b"" if (content := file.extractfile(member)) is None else content.read()) for member in file]


def packed(items: list[tuple[tarfile.TarInfo, bytes]], kind: int = tarfile.GNU_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=kind) as file:
        for member, content in items:
            file.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def info(name: str, kind: bytes = tarfile.REGTYPE, size: int = 0, **fields: Any) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.size = kind, size
    for field, value in fields.items():
        setattr(member, field, value)
    return member


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    store = Store(tmp_path_factory.mktemp("sound") / "store")
    return exported(store, small(store))


# What is written


def test_bundles_come_back(store: Store, other: Store) -> None:
    entries = [make_bundle(store, signature=b'{"by": "me"}'), small(store)]
    found = imported(other, exported(store, *entries))
    assert {entry.key: read_bundle(other, entry) for entry in found} == {
        entry.key: read_bundle(store, entry) for entry in entries
    }
    assert other.verify().bad == []


def test_it_is_a_tarred_image_layout(store: Store, other: Store, tmp_path: Path) -> None:
    entry = make_bundle(store)
    (tmp_path / "a.tar").write_bytes(exported(store, entry))
    (tmp_path / "out").mkdir()
    subprocess.run(["tar", "xf", tmp_path / "a.tar", "-C", tmp_path / "out"], check=True)
    found, _ = pull_bundle(other, f"oci-layout:{tmp_path / 'out'}", trust=Anyone())
    assert read_bundle(other, found) == read_bundle(store, entry)


def test_its_bytes_depend_on_the_bundles_alone(store: Store, other: Store) -> None:
    data = exported(store, make_bundle(store), small(store))
    assert exported(other, small(other), make_bundle(other)) == data
    assert all((item.mtime, item.uid, item.gid, item.uname) == (0, 0, 0, "") for item, _ in members(data))


def test_what_bundles_share_is_in_it_once(store: Store) -> None:
    one, two = make_bundle(store), make_bundle(store, decode=b"another graph of decode")
    both = exported(store, one, two)
    assert len(both) < len(exported(store, one)) + 50_000


def test_a_stream_is_written_and_read(store: Store, other: Store) -> None:
    entry = make_bundle(store)
    buffer = io.BytesIO()
    export_images(store, [entry], buffer)
    assert buffer.getvalue() == exported(store, entry)
    (found,) = import_archive(other, io.BytesIO(buffer.getvalue()), trust=Anyone())[0]
    assert found.key == entry.key


def test_progress_counts_bytes_to_the_end(store: Store, other: Store, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    done = export_images(store, [make_bundle(store)], tmp_path / "a.tar", progress=lambda *now: seen.append(now))
    assert seen[-1] == (done.bytes, done.bytes) == ((tmp_path / "a.tar").stat().st_size,) * 2
    assert seen == sorted(seen)
    seen.clear()
    import_archive(other, tmp_path / "a.tar", trust=Anyone(), progress=lambda *now: seen.append(now))
    assert seen[-1][0] == seen[-1][1] > 0


def test_importing_twice_changes_nothing(store: Store, other: Store) -> None:
    data = exported(store, make_bundle(store))
    imported(other, data)
    before = {path: path.stat().st_mtime_ns for path in files_below(other.layout.blobs)}
    _, report = import_archive(other, other.root.with_name("other.tar"), trust=Anyone())
    assert report.skipped_bytes > 1 << 20 and report.bytes < 1 << 16
    assert {path: path.stat().st_mtime_ns for path in files_below(other.layout.blobs)} == before


def test_an_import_heals_a_damaged_store(store: Store) -> None:
    entry = small(store)
    data = exported(store, entry)
    flip(store.layout.blob(next(iter(read_bundle(store, entry)[0].blobs))))
    assert Store(store.root).verify().bad != []
    imported(store, data)
    assert Store(store.root).verify().bad == []


@pytest.mark.parametrize("name", ["a", "a.tar.zst", "a.tgz", ".tar/a"])
def test_an_archive_needs_a_name_that_says_so(store: Store, tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"name an archive NAME\.tar"):
        export_images(store, [small(store)], tmp_path / name)


def test_only_bundles_and_packed_caches_are_exported(store: Store, tmp_path: Path) -> None:
    entry = store.publish(key("weights"), {"weights": store.put_bytes(b"1")})
    with pytest.raises(ArtifactError, match="neither a bundle nor a packed cache"):
        export_images(store, [entry], tmp_path / "a.tar")
    assert not (tmp_path / "a.tar").exists()


@pytest.mark.parametrize("damage", [flip, Path.unlink])
def test_nothing_is_exported_of_a_damaged_bundle(
    store: Store, tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    entry = small(store)
    damage(store.layout.blob(next(iter(read_bundle(store, entry)[0].blobs))))
    with pytest.raises(ArtifactError):
        export_images(Store(store.root), [entry], tmp_path / "a.tar")
    assert list(tmp_path.glob("*a.tar*")) == []


def test_a_disk_without_room_leaves_the_old_archive(store: Store, tmp_path: Path) -> None:
    entry = small(store)
    (tmp_path / "made.tar").write_bytes(b"old")
    before = sorted(tmp_path.iterdir())

    def full(fd: int, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(atomic_write, "write_all", full)
        with pytest.raises(CapacityError, match="No space left"):
            exported(store, entry)
    assert (tmp_path / "made.tar").read_bytes() == b"old"
    assert sorted(tmp_path.iterdir()) == before


def test_a_folder_that_is_not_there_is_one_error(store: Store, tmp_path: Path) -> None:
    with pytest.raises(UnwritableError, match="choose another location"):
        export_images(store, [small(store)], tmp_path / "nowhere" / "a.tar")


# What of other tools is read


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("prefix", ["", "./"])
def test_members_come_in_any_order_and_header(other: Store, sound: bytes, kind: int, prefix: str) -> None:
    items = []
    for member, content in reversed(members(sound)):
        member.name = prefix + member.name
        member.mode, member.uid, member.mtime, member.uname = 0o600, 1000, 1_700_000_000, "somebody"
        items.append((member, content))
    assert len(imported(other, packed(items, kind))) == 1


@pytest.mark.full
def test_skopeo_reads_what_is_exported_and_what_it_writes_is_imported(
    store: Store, other: Store, tmp_path: Path
) -> None:
    if shutil.which("skopeo") is None:
        pytest.skip("no skopeo: apt-get install skopeo")
    entry = make_bundle(store)
    exported(store, entry)
    copy = ("skopeo", "copy", "--insecure-policy")
    subprocess.run([*copy, f"oci-archive:{tmp_path / 'made.tar'}", f"oci:{tmp_path / 'layout'}:v1"], check=True)
    subprocess.run([*copy, f"oci:{tmp_path / 'layout'}:v1", f"oci-archive:{tmp_path / 'again.tar'}"], check=True)
    ((found,), _) = import_archive(other, tmp_path / "again.tar", trust=Anyone())
    assert read_bundle(other, found) == read_bundle(store, entry)


@pytest.mark.parametrize("program, magic", [("zstd", b"\x28\xb5\x2f\xfd"), ("gzip", b"\x1f\x8b"), ("xz", b"\xfd7zXZ")])
def test_a_compressed_archive_says_how_to_read_it(other: Store, program: str, magic: bytes) -> None:
    assert f"`{program} -dc FILE | llmc cache import -`" in refused(other, magic + bytes(1000))


# What is refused


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
@pytest.mark.parametrize("name", ["index.json", "blobs/sha256/" + "0" * 64, "blobs", "more"])
def test_only_files_and_folders(other: Store, sound: bytes, kind: bytes, name: str) -> None:
    items = [item for item in members(sound) if item[0].name.rstrip("/") != name]
    assert "is not a file of an image layout" in refused(other, packed([*items, (info(name, kind, linkname="x"), b"")]))


@pytest.mark.parametrize(
    "name",
    [
        "/index.json", "../index.json", "blobs/sha256/../x", "blobs/sha256/" + "0" * 63, "blobs/sha256/" + "A" * 64,
        "blobs/sha512/" + "0" * 128, "0" * 64, "index.json\0x", "INDEX.json", "manifest.json", "ｉndex.json",
        "././index.json", "..",
    ],
)  # fmt: skip
def test_no_name_but_those_of_a_layout(other: Store, sound: bytes, name: str) -> None:
    name = name.replace("\0", "\n")
    assert "is not a file of an image layout" in refused(other, packed([*members(sound), (info(name), b"")]))


def test_no_file_twice(other: Store, sound: bytes) -> None:
    for item in [item for item in members(sound) if not item[0].isdir()]:
        assert "is in it twice" in refused(other, packed([*members(sound), item]))


def test_nothing_is_missing(tmp_path: Path, sound: bytes) -> None:
    items = members(sound)
    for number, left_out in enumerate([item for item in items if not item[0].isdir()]):
        store = Store(tmp_path / str(number))  # a new one, as intact blobs of an archive that is refused may stay
        refused(store, packed([item for item in items if item is not left_out]))


def test_an_index_without_images(other: Store, sound: bytes) -> None:
    items = [item for item in members(sound) if item[0].name != "index.json"]
    for text, words in ((b'{"manifests": []}', "it contains no image"), (b"{}", "a list of manifests"), (b"[", "JSON")):
        assert words in refused(other, packed([*items, (info("index.json", size=len(text)), text)]))


def test_every_truncation_is_noticed(other: Store, sound: bytes) -> None:
    content = members(sound)
    end = max(member.offset_data + member.size for member, _ in content)
    for length in range(0, end, 257):
        refused(other, sound[:length])
    refused(other, sound[: end - 1])


@given(bit=st.integers(0, 1 << 30))
def test_no_flipped_bit_brings_anything_else_in(
    tmp_path_factory: pytest.TempPathFactory, sound: bytes, bit: int
) -> None:
    store = Store(tmp_path_factory.mktemp("s") / "store")
    data = bytearray(sound)
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    try:
        (entry,) = imported(store, bytes(data))
    except ArtifactError as error:
        assert store.entries() == [] and "\n" not in str(error)
    else:
        built = Store(store.root.with_name("made"))
        assert read_bundle(store, entry) == read_bundle(built, small(built))


@given(data=st.binary(max_size=3000))
def test_noise_is_not_an_archive(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    refused(Store(tmp_path_factory.mktemp("s") / "store"), data)


def test_headers_too_large_for_memory_are_not_read(other: Store) -> None:
    """An extended header says how many bytes it has, and a sparse file has them for nothing."""
    path = other.root.with_name("other.tar")
    for kind in (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME):
        with path.open("wb") as file:
            file.write(info("x", kind, 1 << 40).tobuf(tarfile.GNU_FORMAT))
            file.truncate(1 << 41)
        with pytest.raises(ArtifactError, match="a header of"):
            import_archive(other, path, trust=Anyone())


def test_no_more_members_than_images_can_have(other: Store, sound: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MAX_MEMBERS", 5)
    assert "more than 5 members" in refused(other, sound)


def test_endless_zeros_are_not_read_to_their_end(other: Store) -> None:
    class Zeros(io.RawIOBase):
        left = 1 << 20

        def read(self, size: int = -1) -> bytes:
            assert 0 <= size <= self.left
            self.left -= size
            return bytes(size)

    with pytest.raises(ArtifactError, match="not an archive"):
        import_archive(other, Zeros(), trust=Anyone())  # type: ignore[arg-type]


def test_what_is_no_file_at_all(other: Store, tmp_path: Path) -> None:
    (tmp_path / "empty.tar").touch()
    for source, words in (
        (tmp_path, "Is a directory"),
        (tmp_path / "nowhere.tar", "No such file"),
        (tmp_path / "empty.tar", "empty header"),
        (tmp_path / "empty.tar" / "below", "Not a directory"),
    ):
        with pytest.raises(ArtifactError, match=words):
            import_archive(other, source, trust=Anyone())


# Who signed it


def test_what_is_not_trusted_is_not_taken(store: Store, other: Store, tmp_path: Path) -> None:
    data = exported(store, small(store))
    with pytest.raises(UntrustedError, match="not signed"):
        imported(other, data, trust=Nobody())
    assert other.entries() == []
    trust = Anyone()
    imported(other, data, trust=trust)
    content = read_bundle(store, small(store))[0].to_bytes()
    assert [item[:3] for item in trust.requested] == [(content, None, False)]


def test_native_code_is_announced_to_trust(store: Store, other: Store) -> None:
    trust = Anyone()
    imported(other, exported(store, small(store, state="native")), trust=trust)
    assert [native for _, _, native, _ in trust.requested] == [True]


def test_a_portable_bundle_that_holds_a_library_is_announced_as_code(store: Store, other: Store) -> None:
    trust = Anyone()
    imported(other, exported(store, small(store, decode=b"\x7fELF" + bytes(100))), trust=trust)
    assert [native for _, _, native, _ in trust.requested] == [False, True]
    assert "holds a shared library (ELF)" in trust.requested[-1][3]


# Faults


SCRIPT = """
    import os, signal, sys
    from pathlib import Path
    from llmc.artifacts.oci.archive import import_archive
    from llmc.artifacts.store.store import Store
    from tests.artifacts.oci.helpers import Anyone

    def die(done, total):
        if done > int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)

    entries, _ = import_archive(Store(sys.argv[1]), Path(sys.argv[2]), trust=Anyone(), progress=die, jobs=1)
    print(len(entries))
"""


def test_killed_at_any_moment_it_leaves_a_sound_store(store: Store, other: Store, tmp_path: Path) -> None:
    exported(store, make_bundle(store))
    for after in (0, 900_000, 1_049_000):
        process = child(SCRIPT, other.root, tmp_path / "made.tar", after)
        process.communicate(timeout=60)
        assert process.returncode == -9
        assert other.entries() == [] and other.verify().bad == []
    assert finish(child(SCRIPT, other.root, tmp_path / "made.tar", 1 << 40)) == "1"
    assert len(other.entries()) == 1 and other.verify().bad == []


def test_several_at_once(store: Store, other: Store, tmp_path: Path) -> None:
    exported(store, make_bundle(store))
    runs = [child(SCRIPT, other.root, tmp_path / "made.tar", 1 << 40) for _ in range(3)]
    assert [finish(run) for run in runs] == ["1"] * 3
    assert other.lookup(other.entries()[0].key, verify=True) is not None


def test_a_collection_in_the_middle_takes_nothing_of_it(store: Store, other: Store) -> None:
    collected: list[int] = []

    def progress(done: int, total: int) -> None:
        collected.append(collect(other.layout, max_size=0, grace=0.0).blobs)

    data = exported(store, make_bundle(store))
    (entry,) = imported(other, data, progress=progress, jobs=1)
    assert set(collected) == {0} and len(collected) >= 4
    assert other.lookup(entry.key, verify=True) is not None
    assert isinstance(read_bundle(other, entry)[0], Manifest)
