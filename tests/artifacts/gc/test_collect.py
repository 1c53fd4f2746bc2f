"""Trimming a store: what goes, in which order, and what never does."""

from __future__ import annotations

import logging
import time

import pytest

from llmc.artifacts import gc as module
from llmc.artifacts.digest import Blob
from llmc.artifacts.gc import collect
from llmc.artifacts.key import Key
from llmc.artifacts.store.layout import Layout
from llmc.artifacts.store.leases import Pin, pin, pins, unpin
from llmc.artifacts.store.store import Store
from llmc.errors import ArtifactError
from tests.artifacts.gc.collecting import DAY, SIZE, age_blobs, content, fill, kept, key, own_size, use
from tests.artifacts.helpers import files_below


def test_the_least_recently_used_goes_first(layout: Layout) -> None:
    fill(layout, 1, 2, 3, 4)
    use(layout, 1, time.time())
    found = collect(layout, max_size=2 * own_size(layout) + SIZE // 2)
    assert kept(layout) == [1, 4]
    assert (found.entries, found.blobs, found.over) == (2, 2, 0)
    assert found.freed == found.before - found.after > 2 * SIZE
    assert files_below(layout.temporaries) == []


def test_within_the_limit_nothing_goes(layout: Layout) -> None:
    fill(layout, 1, 2)
    assert collect(layout, max_size=10 * SIZE, max_age=30 * DAY)[:4] == (0, 0, 0, 0)
    assert kept(layout) == [1, 2]


def test_what_was_not_used_for_long_goes(layout: Layout) -> None:
    fill(layout, 1, 2, 3)
    use(layout, 2, time.time() - 31 * DAY)
    assert collect(layout, max_age=30 * DAY).entries == 1
    assert kept(layout) == [1, 3]


def test_a_blob_that_another_entry_names_stays(layout: Layout) -> None:
    fill(layout, 1, 2, shared=b"weights" * 1000)
    found = collect(layout, max_size=own_size(layout) + 8000)
    assert kept(layout) == [2]
    assert found.blobs == 1, "its own, not the shared one"


def test_an_entry_whose_removal_frees_nothing_stays_if_it_fits(layout: Layout) -> None:
    """Executables of a bundle that is kept: building them again would cost time, and keeping them costs nothing."""
    fill(layout, 1, 2)
    store = Store(layout.root)
    store.publish(key(3), {"own": store.put_bytes(content(1))})
    del store
    found = collect(layout, max_size=own_size(layout) + 1000)
    assert kept(layout) == [1, 3]
    assert found.entries == 1


def test_garbage_goes_without_limits_but_not_what_is_new(layout: Layout) -> None:
    fill(layout, 1)
    Store(layout.root).put_bytes(b"old garbage")
    age_blobs(layout)
    new = Store(layout.root).put_bytes(b"a build may be about to name this")
    found = collect(layout)
    assert (found.blobs, found.freed, found.waiting) == (1, 11, new.size)
    assert Store(layout.root).has(new)
    assert kept(layout) == [1]
    assert collect(layout, grace=0).blobs == 1


def test_what_is_pinned_stays(layout: Layout) -> None:
    fill(layout, 1, 2)
    pin(layout, key(1))
    found = collect(layout, max_size=0, max_age=0)
    assert kept(layout) == [1]
    assert dict(found.kept) == {"pinned": 1}
    assert found.over == found.after == own_size(layout)
    unpin(layout, pins(layout)[0])
    assert collect(layout, max_size=0).after == 0


def test_a_pin_is_there_once_and_outlives_its_entry(layout: Layout) -> None:
    fill(layout, 1)
    with pytest.raises(ArtifactError, match="no entry k"):
        pin(layout, key(2))
    pin(layout, key(1))
    pin(layout, key(1))
    layout.entry("k", key(1).hex).unlink()
    (layout.pins / "a stranger").touch()
    assert [(item.kind, item.hex) for item in pins(layout)] == [("k", key(1).hex)]
    fill(layout, 1)
    collect(layout, max_size=0)
    assert kept(layout) == [1]
    unpin(layout, Pin("k", key(1).hex, 0.0))
    assert pins(layout) == []


def test_what_a_living_store_was_given_stays(layout: Layout) -> None:
    fill(layout, 1, 2)
    user = Store(layout.root)
    entry = user.lookup(key(1))
    assert entry is not None
    found = collect(layout, max_size=0)
    assert kept(layout) == [1]
    assert dict(found.kept) == {"in use": 1}
    assert user.path(entry.outputs["own"]).read_bytes() == content(1)
    del user
    assert collect(layout, max_size=0).entries == 1


def test_what_a_build_has_stored_stays_however_long_it_takes(layout: Layout) -> None:
    runs: list[int] = []

    def build(space):  # type: ignore[no-untyped-def]
        runs.append(1)
        blob = space.put_bytes(b"weights")
        age_blobs(layout)
        assert collect(layout, max_size=0).blobs == 0
        return {"weights": blob}

    store = Store(layout.root)
    assert store.get_or_build(key(1), build)[1] is False
    assert len(runs) == 1


def test_a_build_whose_blob_went_is_built_once_more(layout: Layout) -> None:
    runs: list[int] = []

    def build(space):  # type: ignore[no-untyped-def]
        runs.append(1)
        blob = space.put_bytes(b"weights")
        if len(runs) == 1:
            layout.blob(blob.digest).unlink()
        return {"weights": blob}

    entry, _ = Store(layout.root).get_or_build(key(1), build)
    assert len(runs) == 2
    assert Store(layout.root).get_bytes(entry.outputs["weights"].digest) == b"weights"


def test_a_collected_entry_is_a_clean_miss(layout: Layout, caplog: pytest.LogCaptureFixture) -> None:
    fill(layout, 1)
    reader = Store(layout.root)
    listed = reader.entries()
    collect(layout, max_size=0)
    with caplog.at_level(logging.WARNING, "llmc.artifacts"):
        assert reader.lookup(listed[0].key, verify=True) is None
    assert caplog.text == ""
    assert reader.counters["corrupt"] == 0
    assert files_below(layout.quarantine) == []


def test_an_entry_that_is_collected_while_it_is_looked_at_is_a_clean_miss(
    layout: Layout, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader has read the entry; before it notes its use, everything goes."""
    from llmc.artifacts.store.entries import Entries

    fill(layout, 1)
    reader, original, calls = Store(layout.root), Entries.read, []

    def read(self: Entries, wanted: Key):  # type: ignore[no-untyped-def]
        found = original(self, wanted)
        if not calls:
            calls.append(1)
            collect(layout, max_size=0)
        return found

    monkeypatch.setattr(Entries, "read", read)
    with caplog.at_level(logging.WARNING, "llmc.artifacts"):
        assert reader.lookup(key(1), verify=True) is None
    assert caplog.text == ""
    assert reader.counters["corrupt"] == 0


def test_who_comes_while_things_are_moved_away_gets_them_back(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a gate: the user notes its use after the first look, and before the second."""
    fill(layout, 1, 2)
    user = Store(layout.root)
    original = module.in_use

    def second_look(where: Layout, now: float, **of_inventory: bool):  # type: ignore[no-untyped-def]
        if not of_inventory:
            user.hold(f"entries/k/{key(1).hex}")
        return original(where, now, **of_inventory)

    monkeypatch.setattr(module, "in_use", second_look)
    collect(layout, max_size=0)
    assert kept(layout) == [1]
    assert files_below(layout.temporaries) == []


def test_a_blob_that_is_named_while_it_is_moved_away_comes_back(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(layout, 1)
    original = module._Run._park

    def park(self, name, paths):  # type: ignore[no-untyped-def]
        moved = original(self, name, paths)
        if name.startswith("sha256:"):
            Store(layout.root)._main.entries.write(key(2), {"own": Blob(name, SIZE)}, {})
        return moved

    monkeypatch.setattr(module._Run, "_park", park)
    collect(layout, max_age=12 * 3600)
    monkeypatch.undo()
    assert kept(layout) == [2]
