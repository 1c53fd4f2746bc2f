"""Archives that are too big, torn, altered or interrupted (P13): never a wrong blob, never half an import."""

from __future__ import annotations

import io
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.artifacts.archives import compression, reader, stream
from llmc.artifacts.archives.format import BLOCK, END, blob_name, entry_name, header
from llmc.artifacts.archives.reader import import_archive
from llmc.artifacts.bundle.manifest_schema import FILE_NAME
from llmc.artifacts.digest import digest_bytes
from llmc.artifacts.gc.collect import collect
from llmc.artifacts.store.entries import Entry, encode_entry
from llmc.artifacts.store.store import Store
from llmc.errors import ArtifactError, CapacityError
from tests.artifacts.archives.helpers import Words, blob_members, head, import_bytes, member, refused, sound, squeezed
from tests.artifacts.helpers import CONTENT, DIGESTS, child, files_below, finish, key, manifest
from tests.tiers import examples

SOUND = sound()
HEAD = head(manifest())
BLOBS = blob_members()


def test_a_disk_is_not_filled_by_what_an_archive_announces(store: Store) -> None:
    huge = manifest(blobs={**{DIGESTS[n]: len(c) for n, c in CONTENT.items()}, "sha256:" + "0" * 64: 1 << 49})
    with pytest.raises(CapacityError, match="nothing was imported"):
        import_bytes(store, head(huge) + header("blobs/sha256/" + "0" * 64, 1 << 49) + bytes(1 << 16))
    assert store.usage().blobs == 0


def test_a_member_too_large_to_hold_is_not_held(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "more than the" in refused(store, header(FILE_NAME, 1 << 40) + bytes(1 << 16))
    assert "more than the" in refused(store, HEAD + header("signature.json", 1 << 30) + bytes(1 << 16))
    checksum = header(FILE_NAME, 10) + bytes(BLOCK) + header("manifest.sha256", 1 << 30)
    assert "more than the" in refused(store, checksum + bytes(1 << 16))
    name = entry_name(key())
    assert "entries take more than" in refused(store, header(name, 1 << 40) + bytes(1 << 16))
    assert "more than the" in refused(store, header(name, (16 << 20) + 1) + bytes(1 << 16))
    monkeypatch.setattr(reader, "MAX_ENTRY_BYTES", 500)
    members = b"".join(
        member(entry_name(item), encode_entry(Entry(item, {}, {}, 0.0, 0.0)))
        for item in sorted((key(batch=n) for n in range(8)), key=entry_name)
    )
    assert "entries take more than 500" in refused(store, members + END)


def test_a_bomb_is_noticed_by_its_ratio(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "RATIO_FROM", 1 << 20)
    zeros = digest_bytes(bytes(1 << 26))
    bomb = manifest(blobs={**manifest().blobs, zeros: 1 << 26})
    parts = sorted([*BLOBS, member(blob_name(zeros), bytes(1 << 26))], key=lambda part: part[:100])
    data = squeezed(head(bomb) + b"".join(parts) + END)
    assert len(data) < 30_000
    assert "1000 times its size" in refused(store, data)


def test_a_window_too_large_for_memory_is_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def frame(exponent: int) -> bytes:
        return b"\x28\xb5\x2f\xfd" + bytes([0x00, (exponent - 10) << 3]) + (5 << 3 | 1).to_bytes(3, "little") + b"hello"

    assert "takes more than 128 MiB" in refused(store, frame(31))
    assert "cut off at byte" in refused(store, frame(21))
    monkeypatch.setattr(compression, "WINDOW_LOG_MAX", 20)
    assert "takes more than 1 MiB" in refused(store, frame(21))


@pytest.mark.parametrize("tail", [b"\0", bytes(BLOCK), bytes(1 << 20), b"x", SOUND], ids=len)
def test_nothing_follows_the_end(store: Store, tail: bytes) -> None:
    assert "something follows its end" in refused(store, SOUND + tail)
    assert "something follows its end" in refused(store, squeezed(SOUND + tail))
    assert "something follows the end" in refused(store, squeezed(SOUND) + tail)


def test_endless_zeros_are_not_read_to_their_end(store: Store, tmp_path: Path) -> None:
    class Endless(io.RawIOBase):
        count = 0

        def read(self, size: int = -1) -> bytes:
            self.count += 1
            assert self.count < 5
            return (SOUND + bytes(1 << 16))[: 1 << 16]

    for source in (Endless(), Path("/dev/zero")):
        with pytest.raises(ArtifactError, match="follows its end"):
            import_archive(store, source, trust=Words(allow_unsigned=True))  # type: ignore[arg-type]
    (tmp_path / "in" / "store.tar").touch()


def test_every_truncation_is_noticed(store: Store) -> None:
    cuts = {*range(0, len(SOUND), BLOCK), *(at + 1 for at in range(0, len(SOUND), BLOCK)), len(SOUND) - 1}
    for cut in sorted(cuts):
        message = refused(store, SOUND[:cut])
        assert "cut off" in message or (cut == 0 and "empty" in message), (cut, message)
    data = squeezed(SOUND)
    for cut in range(1, len(data)):
        assert "cut off" in refused(store, data[:cut])


@examples(250)
@given(st.integers(0, len(SOUND) * 8 - 1))
def test_no_flipped_bit_is_overlooked(tmp_path_factory: pytest.TempPathFactory, bit: int) -> None:
    data = bytearray(SOUND)
    data[bit // 8] ^= 1 << bit % 8
    store = Store(tmp_path_factory.getbasetemp() / "flips" / "store")
    store.root.parent.mkdir(exist_ok=True)
    refused(store, bytes(data))
    assert store.entries() == []


@examples(250)
@given(st.integers(0, len(squeezed(SOUND)) * 8 - 1))
def test_no_flipped_bit_of_a_compressed_archive_leads_to_anything_else(
    tmp_path_factory: pytest.TempPathFactory, bit: int
) -> None:
    data = bytearray(squeezed(SOUND))
    data[bit // 8] ^= 1 << bit % 8
    store = Store(tmp_path_factory.getbasetemp() / "flips" / "store")
    store.root.parent.mkdir(exist_ok=True)
    try:
        import_bytes(store, bytes(data))
    except ArtifactError:
        assert store.entries() == []
    else:  # a bit that zstd does not use
        assert [entry.key.components["manifest"] for entry in store.entries()] == [manifest().digest]
        for path in files_below(store.layout.entries):
            path.unlink()


@examples(100)
@given(st.binary(max_size=3000), st.booleans())
def test_noise_is_not_an_archive(tmp_path_factory: pytest.TempPathFactory, data: bytes, zstd: bool) -> None:
    store = Store(tmp_path_factory.getbasetemp() / "noise" / "store")
    store.root.parent.mkdir(exist_ok=True)
    refused(store, b"\x28\xb5\x2f\xfd" + data if zstd else data)


def test_what_is_no_file_at_all(store: Store, tmp_path: Path) -> None:
    (tmp_path / "in" / "store.tar").touch()
    for source, words in (
        (tmp_path, "Is a directory"),
        (tmp_path / "nowhere.tar", "No such file"),
        (tmp_path / "in" / "store.tar", "empty"),
        (tmp_path / "in" / "store.tar" / "below", "Not a directory"),
    ):
        with pytest.raises(ArtifactError, match=words):
            import_archive(store, source, trust=Words(allow_unsigned=True))


def test_what_was_intact_of_a_torn_archive_is_not_fetched_again(store: Store, tmp_path: Path) -> None:
    refused(store, SOUND[: -len(END) - len(BLOBS[-1])])
    assert store.usage().blobs == len(BLOBS) - 1
    other = Store(store.root)
    assert import_bytes(other, SOUND).new_blobs == 1
    for path in files_below(store.layout.entries):
        path.unlink()


def test_killed_at_any_moment_it_leaves_a_sound_store(store: Store, tmp_path: Path) -> None:
    """Killed after so many pieces of a slow stream; then imported as a whole."""
    script = """
        import os, signal, sys
        from pathlib import Path
        from llmc.artifacts.archives import stream
        from llmc.artifacts.archives.reader import import_archive
        from tests.artifacts.archives.helpers import Words
        from llmc.artifacts.store.store import Store
        stream.RAW_PIECE = 700
        def kill(done, total):
            if done > int(sys.argv[3]): os.kill(os.getpid(), signal.SIGKILL)
        import_archive(Store(sys.argv[1]), Path(sys.argv[2]), trust=Words(allow_unsigned=True), progress=kill)
    """
    path = tmp_path / "in" / "store.tar"
    path.write_bytes(SOUND)
    for after in (3000, len(SOUND) - 1500):
        process = child(script, store.root, path, after)
        process.communicate(timeout=60)
        assert process.returncode == -9
        assert store.entries() == [] and store.verify().bad == []
    finish(child(script, store.root, path, 1 << 30))
    assert len(store.entries()) == 1
    for item in [*files_below(store.layout.entries), *files_below(store.layout.temporaries)]:
        item.unlink()


def test_two_at_once(store: Store, tmp_path: Path) -> None:
    script = """
        import sys
        from pathlib import Path
        from llmc.artifacts.archives.reader import import_archive
        from tests.artifacts.archives.helpers import Words
        from llmc.artifacts.store.store import Store
        print(len(import_archive(Store(sys.argv[1]), Path(sys.argv[2]), trust=Words(allow_unsigned=True)).entries))
    """
    path = tmp_path / "in" / "store.tar"
    path.write_bytes(SOUND)
    assert [finish(run) for run in [child(script, store.root, path) for _ in range(3)]] == ["1"] * 3
    assert store.lookup(store.entries()[0].key, verify=True) is not None
    for item in files_below(store.layout.entries):
        item.unlink()


def test_nothing_that_was_imported_can_be_written_or_run(store: Store) -> None:
    refused(store, SOUND[: -len(END)])
    modes = {stat.S_IMODE(path.stat().st_mode) for path in files_below(store.layout.blobs)}
    assert modes == {0o444}


def test_a_collection_in_the_middle_takes_nothing_of_it(store: Store, tmp_path: Path) -> None:
    """Blobs that nothing names yet, older than any grace: what the import holds stays."""
    path = tmp_path / "in" / "store.tar"
    path.write_bytes(SOUND)
    collected: list[int] = []

    class Slow:
        """The archive in small pieces, with a collection by another process's eyes before each."""

        def __init__(self) -> None:
            self._file = path.open("rb")

        def read(self, _: int) -> bytes:
            collected.append(collect(store.layout, max_size=0, grace=0.0).blobs)
            return self._file.read(900)

    slow = Slow()
    import_archive(store, slow, trust=Words(allow_unsigned=True))  # type: ignore[arg-type]
    slow._file.close()
    assert set(collected) == {0} and len(collected) > 5
    assert store.lookup(store.entries()[0].key, verify=True) is not None
    for item in files_below(store.layout.entries):
        item.unlink()
