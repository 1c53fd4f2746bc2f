"""Every byte of an entry, of a blob and of the stamps may be wrong: never wrong content, always healed (P3, P4, P5)."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmc.artifacts.digest import Blob, digest_bytes
from llmc.artifacts.store.blobs import BlobMissingError
from llmc.artifacts.store.entries import Entry, decode_entry, encode_entry
from llmc.artifacts.store.leases import in_use
from llmc.artifacts.store.store import Store
from llmc.artifacts.store.workspace import Workspace
from llmc.artifacts.verified_files import FILE_NAME, VerifiedFiles
from tests.artifacts.helpers import key, overwrite

CONTENT = bytes(range(256)) * 20
REGION = 97


def build(space: Workspace) -> dict[str, Blob]:
    space.meta["seconds"] = 2.5
    return {"graph": space.put_bytes(CONTENT), "notes": space.put_bytes(b"")}


def built(store: Store) -> Entry:
    return store.get_or_build(key(), build)[0]


def entry_file(store: Store) -> Path:
    return store.layout.entry(key().kind, key().hex)


def require_healed(store: Store) -> None:
    """The next run is right, and the one after it is a hit."""
    assert content(Store(store.root), built(Store(store.root))) == CONTENT
    entry, hit = Store(store.root).get_or_build(key(), build)
    assert hit
    assert content(store, entry) == CONTENT


def content(store: Store, entry: Entry) -> bytes:
    return store.get_bytes(entry.outputs["graph"].digest)


def flips(data: bytes, bits: tuple[int, ...] = tuple(range(8))) -> Iterator[tuple[str, bytes]]:
    for index in range(len(data)):
        for bit in bits:
            yield (
                f"byte {index}, bit {bit}",
                data[:index] + bytes([data[index] ^ 1 << bit]) + data[index + 1 :],
            )


def test_no_flipped_bit_makes_another_entry() -> None:
    signature = {"payload": "e30=", "signatures": [{"keyid": "abc", "sig": "AAAA"}]}
    entry = Entry(key(), {"graph": Blob(digest_bytes(b"g"), 1)}, {"seconds": 2.5}, 1.75e9, 0.0, signature)
    data = encode_entry(entry)
    start = data.index(b'"signature":') + len(b'"signature":')
    for name, flipped in flips(data):
        try:
            read = decode_entry(flipped)
        except ValueError:
            continue
        where = next(index for index in range(len(data)) if data[index] != flipped[index])
        assert where >= start, f"{name} was not noticed"
        assert read._replace(signature=signature) == entry, name
        assert read.signature is not None, f"{name}: the signature vanished"


@pytest.mark.parametrize("bit", [0, 6])
def test_every_byte_of_an_entry_is_checked_when_it_is_read(store: Store, bit: int) -> None:
    first = built(store)
    data = entry_file(store).read_bytes()
    same = 0
    for name, flipped in flips(data, (bit,)):
        overwrite(entry_file(store), flipped)
        found = Store(store.root).lookup(key())
        if found is None:
            assert not entry_file(store).exists(), "it is in quarantine"
            entry_file(store).write_bytes(data)
        else:  # the last digit of a time in seconds says less than a float can hold
            assert found._replace(used=0) == first._replace(used=0), name
            same += 1
        assert Store(store.root).lookup(key()) is not None
    assert same < 3
    overwrite(entry_file(store), data[:-1])
    require_healed(store)


def test_an_entry_cut_off_at_any_byte_is_a_miss(store: Store) -> None:
    built(store)
    data = entry_file(store).read_bytes()
    entry_file(store).unlink()
    for size in range(len(data)):
        for torn in (data[:size], data[:size] + bytes(len(data) - size)):
            entry_file(store).write_bytes(torn)
            assert Store(store.root).lookup(key()) is None, size
    require_healed(store)


DAMAGE: dict[str, Callable[[bytes, int], bytes]] = {
    "flipped": lambda data, at: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :],
    "zeros": lambda data, at: data[:at] + bytes(len(data[at : at + REGION]) + 1) + data[at + REGION + 1 :],
    "cut off": lambda data, at: data[:at],
    "longer": lambda data, at: data[:at] + b"x" + data[at:],
    "swapped": lambda data, at: data[at + 1 :] + data[: at + 1],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_every_region_of_a_blob_is_checked_when_it_is_read(store: Store, damage: str) -> None:
    blob = built(store).outputs["graph"]
    path = store.layout.blob(blob.digest)
    for index in range(0, len(CONTENT), REGION):
        wrong = DAMAGE[damage](CONTENT, index)
        if wrong == CONTENT:
            continue
        overwrite(path, wrong)
        with pytest.raises(BlobMissingError):
            Store(store.root).get_bytes(blob.digest)
        assert not path.exists(), "it is in quarantine"
        path.write_bytes(wrong)
        with pytest.raises(BlobMissingError):
            Store(store.root).path(blob)
        path.write_bytes(wrong)
        entry, hit = Store(store.root).get_or_build(key(), build)
        assert not hit
        assert content(store, entry) == CONTENT
    require_healed(store)


def test_a_blob_of_another_size_is_never_served_not_even_unverified(store: Store) -> None:
    blob = built(store).outputs["graph"]
    overwrite(store.layout.blob(blob.digest), CONTENT[:-1])
    assert not Store(store.root).has(blob)
    require_healed(store)


def test_damage_after_a_file_was_verified_is_noticed(store: Store) -> None:
    """In one process: the stamp of a verified file does not hide what happens to it later."""
    blob = built(store).outputs["graph"]
    time.sleep(0.03)
    path = store.path(blob)
    assert store._main.stamps.verified(path, blob.digest), "it was verified, and is not hashed again"
    for location in (0, len(CONTENT) - 1):
        overwrite(path, DAMAGE["flipped"](CONTENT, location))
        with pytest.raises(BlobMissingError):
            store.path(blob)
        assert content(store, built(store)) == CONTENT


def test_a_file_that_is_healed_in_the_moment_it_is_moved_away_is_put_back(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    blob = built(store).outputs["graph"]
    path = store.layout.blob(blob.digest)
    overwrite(path, DAMAGE["flipped"](CONTENT, 7))
    rename = Path.rename

    def heal_first(self: Path, target: Path) -> Path:
        if self == path:
            rename(path, tmp_path / "as another process moved it")
            Store(store.root).put_bytes(CONTENT)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", heal_first)
    with pytest.raises(BlobMissingError):
        Store(store.root).path(blob)
    monkeypatch.undo()
    assert path.read_bytes() == CONTENT


def test_no_flipped_bit_in_the_stamps_makes_an_altered_file_pass(store: Store) -> None:
    blob = built(store).outputs["graph"]
    time.sleep(0.03)
    path = store.path(blob)
    store._main.stamps.save()
    table = store.layout.base / FILE_NAME
    data = table.read_bytes()
    assert VerifiedFiles(store.layout.base).verified(path, blob.digest)
    overwrite(path, DAMAGE["flipped"](CONTENT, 7))
    for name, flipped in flips(data, (0, 4)):
        table.write_bytes(flipped)
        stamps = VerifiedFiles(store.layout.base)
        assert not stamps.verified(path, blob.digest), name
    for size in range(len(data)):
        table.write_bytes(data[:size])
        assert not VerifiedFiles(store.layout.base).verified(path, blob.digest)
    require_healed(store)


# What may stand in the place of a file


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the name of a socket is short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name[:90])
    Path(path.name[:90]).rename(path.name)
    os.chdir(here)


def _folder(path: Path) -> None:
    (path / "below").mkdir(parents=True)
    (path / "below" / "file").write_text("x")


STAND_INS: dict[str, Callable[[Path], None]] = {
    "nothing": lambda path: None,
    "an empty file": lambda path: path.touch(),
    "a folder": lambda path: path.mkdir(),
    "a folder with files": _folder,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a link to a file that fails with EIO": lambda path: path.symlink_to("/proc/self/mem"),
    "a link to a file without end": lambda path: path.symlink_to("/dev/zero"),
    "a pipe": _pipe,
    "a socket": _socket,
}


def _lock_file(store: Store) -> Path:
    return store.layout.lock(key().kind, key().hex)


STORE_FILES: dict[str, Callable[[Store], Path]] = {
    "an entry": entry_file,
    "a blob": lambda store: store.layout.blob(digest_bytes(CONTENT)),
    "an empty blob": lambda store: store.layout.blob(digest_bytes(b"")),
    "the stamps": lambda store: store.layout.base / FILE_NAME,
    "a lock": _lock_file,
}


@pytest.mark.parametrize("location", STORE_FILES)
@pytest.mark.parametrize("stand_in", STAND_INS)
def test_whatever_stands_in_the_place_of_a_file_is_healed(
    store: Store, no_waiting: None, location: str, stand_in: str
) -> None:
    built(store)
    path = STORE_FILES[location](store)
    path.unlink(missing_ok=True)
    STAND_INS[stand_in](path)
    digest = digest_bytes(CONTENT)
    try:
        assert Store(store.root).get_bytes(digest) == CONTENT
    except BlobMissingError:
        assert location == "a blob"
    path.unlink() if path.is_file() or path.is_symlink() else None
    if not os.path.lexists(path):
        STAND_INS[stand_in](path)
    require_healed(store)
    assert store.verify().bad == []


@pytest.mark.parametrize("stand_in", STAND_INS)
def test_a_whole_check_of_a_store_waits_for_nothing(store: Store, no_waiting: None, stand_in: str) -> None:
    built(store)
    for location in ("an entry", "a blob"):
        path = STORE_FILES[location](store)
        path.unlink()
        STAND_INS[stand_in](path)
    assert store.verify().bad or stand_in == "nothing"
    require_healed(store)
    assert store.verify().bad == []


@pytest.mark.parametrize("stand_in", STAND_INS)
def test_nothing_in_the_place_of_a_lease_keeps_a_store_from_being_collected(
    store: Store, no_waiting: None, stand_in: str
) -> None:
    built(store)
    store.layout.leases.mkdir(exist_ok=True)
    STAND_INS[stand_in](store.layout.leases / ("0" * 24))
    assert in_use(store.layout), "what this store was given"
    require_healed(store)
