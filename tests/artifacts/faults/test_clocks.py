"""Clocks that jump: times are for order and for people, never for what is right."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from llmc.artifacts import verified_files
from llmc.artifacts.store.store import Store
from tests.artifacts.helpers import files_below, flip, key

DAY = 86_400


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "store")
    store.get_or_build(key(), lambda space: {"graph": space.put_bytes(b"graph")})
    return store


@pytest.mark.parametrize("days", [-20_000, -1, 1, 400, 40_000])
def test_files_from_the_past_and_the_future_are_read_like_any_other(store: Store, days: int) -> None:
    for path in files_below(store.root):
        os.utime(path, (max(time.time() + days * DAY, 0), max(time.time() + days * DAY, 0)))
    for _ in range(2):
        entry, hit = Store(store.root).get_or_build(key(), lambda space: {})
        assert hit
        assert store.get_bytes(entry.outputs["graph"].digest) == b"graph"
    assert store.verify().bad == []


@pytest.mark.parametrize("seconds", [-3600, 3600])
def test_no_stamp_is_believed_after_an_alteration_whatever_the_clock_says(
    store: Store, monkeypatch: pytest.MonkeyPatch, seconds: int
) -> None:
    entry = store.lookup(key())
    assert entry is not None
    path = store.path(entry.outputs["graph"])
    now = time.time_ns()
    monkeypatch.setattr(verified_files.time, "time_ns", lambda: now + seconds * 1_000_000_000)
    fresh = Store(store.root)
    fresh.path(entry.outputs["graph"])
    seen = path.stat()
    flip(path)
    os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    assert fresh.lookup(key(), verify=True) is None


def test_a_clock_behind_the_files_stamps_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = store.lookup(key())
    assert entry is not None
    blob = entry.outputs["graph"]
    time.sleep(0.03)
    behind = time.time_ns() - 3600 * 1_000_000_000
    monkeypatch.setattr(verified_files.time, "time_ns", lambda: behind)
    fresh = Store(store.root)
    assert not fresh._main.stamps.verified(fresh.path(blob), blob.digest), "it is hashed again rather than believed"
