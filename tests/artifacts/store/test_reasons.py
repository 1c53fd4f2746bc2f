"""Every miss that leads to a build is logged once, with a reason that a person understands."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from llmc.artifacts.digest import Blob
from llmc.artifacts.key import Key
from llmc.artifacts.store.entries import Entry, encode_entry
from llmc.artifacts.store.store import Store
from llmc.artifacts.store.workspace import Workspace
from tests.artifacts.helpers import flip, key

OLD = key(**{"toolchain.onnxruntime": "1.30.0"})
Outputs = dict[str, Blob]


def make(space: Workspace) -> Outputs:
    return {"graph": space.put_bytes(b"graph" * 100)}


@pytest.fixture
def reasons(caplog: pytest.LogCaptureFixture) -> Callable[[Store, Key], list[str]]:
    """What is logged as the reason while a key is asked for, and built."""

    def ask(store: Store, wanted: Key) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.INFO, "llmc.artifacts"):
            _, hit = store.get_or_build(wanted, make)
        assert not hit
        start = f"miss {wanted.kind} {wanted.short}: "
        return [message.removeprefix(start) for message in caplog.messages if message.startswith(start)]

    return ask


Reasons = Callable[[Store, Key], list[str]]


def entry_file(store: Store, of: Key) -> Path:
    return store.layout.entry(of.kind, of.hex)


def test_the_component_that_changed(store: Store, reasons: Reasons) -> None:
    store.get_or_build(OLD, make)
    assert reasons(store, key()) == ["toolchain.onnxruntime: 1.30.0 → 1.31.1"]


def test_of_many_components_the_first_few_and_how_many_more(store: Store, reasons: Reasons) -> None:
    store.get_or_build(Key("executable", {f"part{i}": i for i in range(9)}), make)
    assert reasons(store, Key("executable", {f"part{i}": -i for i in range(1, 10)})) == [
        "part0: 0 → (absent), part1: 1 → -1, part2: 2 → -2, part3: 3 → -3, and 6 more"
    ]


def test_a_new_store(store: Store, reasons: Reasons) -> None:
    assert reasons(store, key()) == [f"nothing of kind executable is stored: the store {store.root} is new"]


def test_a_new_kind(store: Store, reasons: Reasons) -> None:
    store.get_or_build(key("weights"), make)
    assert reasons(store, key()) == ["nothing of kind executable is stored"]


def test_a_store_of_other_versions_of_llmc(store: Store, reasons: Reasons) -> None:
    (store.root / "v0").mkdir(parents=True)
    (store.root / "v12").mkdir()
    (reason,) = reasons(store, key())
    assert reason.endswith(f"{store.root} holds v0, v12 of other versions of llmc, and this one reads v1")


def test_a_damaged_entry(store: Store, reasons: Reasons) -> None:
    store.get_or_build(OLD, make)
    store.get_or_build(key(), make)
    entry_file(store, key()).write_bytes(b"{")
    (reason,) = reasons(store, key())
    assert reason.startswith("its entry was quarantined: not an entry (")
    assert store.get_or_build(key(), make)[1], "and it is whole again"


def test_an_entry_of_another_schema(store: Store, reasons: Reasons) -> None:
    """Which nothing writes here: it was copied by hand from another version's folder."""
    entry, _ = store.get_or_build(key(), make)
    body = json.loads(encode_entry(entry))["entry"]
    from llmc.artifacts.digest import digest_bytes
    from llmc.artifacts.key import canonical_json

    body["schema"] = 2
    document = {"digest": digest_bytes(canonical_json(body)), "entry": body}
    entry_file(store, key()).write_bytes(canonical_json(document))
    assert reasons(Store(store.root), key()) == ["its entry was quarantined: not an entry (schema 2, expected 1)"]


@pytest.mark.parametrize("damage", [flip, Path.unlink], ids=["damaged", "missing"])
def test_a_blob_that_is_not_as_it_was(store: Store, reasons: Reasons, damage: Callable[[Path], None]) -> None:
    entry, _ = store.get_or_build(key(), make)
    damage(store.path(entry.outputs["graph"]))
    assert reasons(store, key()) == ["its entry was quarantined: blob of 'graph' is missing or damaged"]


def test_a_reason_is_about_now_and_not_about_damage_of_long_ago(store: Store, reasons: Reasons) -> None:
    store.get_or_build(OLD, make)
    store.get_or_build(key(), make)
    entry_file(store, key()).write_bytes(b"{")
    reasons(store, key())
    entry_file(store, key()).unlink()
    assert reasons(store, key()) == ["toolchain.onnxruntime: 1.30.0 → 1.31.1"]


def test_what_belongs_to_one_machine(store: Store, reasons: Reasons) -> None:
    store.get_or_build(Key("local-file-digest", {"inode": 1}), make)
    assert reasons(store, Key("local-file-digest", {"inode": 2})) == [
        "not seen on this machine before, or changed since"
    ]


def test_what_belongs_to_one_machine_is_not_taken_from_a_shared_store(store: Store, tmp_path: Path) -> None:
    local = Key("local-file-digest", {"inode": 1})
    store.get_or_build(local, make)
    store.get_or_build(key(), make)
    mine = Store(tmp_path / "mine", shared=[store.root])
    assert mine.get_or_build(key(), make)[1]
    assert not mine.get_or_build(local, make)[1]


def test_the_nearest_may_be_in_a_shared_store(store: Store, tmp_path: Path, reasons: Reasons) -> None:
    store.get_or_build(OLD, make)
    mine = Store(tmp_path / "mine", shared=[store.root])
    assert reasons(mine, key()) == ["toolchain.onnxruntime: 1.30.0 → 1.31.1"]


def test_asking_again_says_the_same(store: Store) -> None:
    store.get_or_build(OLD, make)
    assert store.why(key()) == store.why(key()) == "toolchain.onnxruntime: 1.30.0 → 1.31.1"
    store.get_or_build(key(batch=8), make)
    assert store.why(key(batch=9)) == "batch: 8 → 9", "a new entry is seen at once"


def test_of_entries_equally_near_the_one_used_last_is_named(store: Store) -> None:
    import os

    for batch, used in ((1, 500.0), (2, 900.0), (3, 700.0)):
        of = key(batch=batch)
        store.get_or_build(of, make)
        os.utime(entry_file(store, of), (used, used))
    assert Store(store.root).why(key(batch=9)) == "batch: 2 → 9"


def test_of_entries_equally_near_one_of_the_same_shape_is_named(store: Store) -> None:
    """Else a compile with a new toolchain would find its second graph near its first, which differs in shape only."""
    for toolchain, batch in (("1.30", 8), ("1.31", 4)):
        store.get_or_build(Key("executable", {"toolchain.x": toolchain, "shape.batch": batch}), make)
    assert store.why(Key("executable", {"toolchain.x": "1.31", "shape.batch": 8})) == "toolchain.x: 1.30 → 1.31"


def test_a_big_store_is_not_read_whole(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmc.artifacts.store import entries

    folder = store.layout.entries / "executable"
    folder.mkdir(parents=True)
    for batch in range(30):
        of = key(batch=batch)
        (folder / f"{of.hex}.json").write_bytes(encode_entry(Entry(of, {}, {}, 0.0, 0.0)))
    monkeypatch.setattr(entries, "NEAREST_SCANNED", 20)
    monkeypatch.setattr(entries, "NEAREST_CANDIDATES", 5)
    read: list[Path] = []
    load = entries.Entries.load
    monkeypatch.setattr(entries.Entries, "load", lambda *given: read.append(given[1]) or load(*given))
    for _ in range(3):
        assert store.why(key(batch=99)).startswith("batch: ")
    assert len(read) == 5, "once for all that ask before the folder changes"
