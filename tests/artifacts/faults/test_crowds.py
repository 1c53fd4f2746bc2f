"""64 processes at once, on one key and on many, with locks and where locks silently do nothing (P6)."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from llmc.artifacts.store.store import Store
from tests.artifacts.helpers import child, files_below, finish, flip, key
from tests.tiers import default_cases, full

COUNT = 64
SCRIPT = """
    import sys
    from pathlib import Path
    from tests.artifacts.faults import crowds
    crowds.main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "many", sys.argv[4:])
"""


def crowd(root: Path, kind: str, *faults: str, count: int = COUNT) -> dict[str, int]:
    found: dict[str, int] = json.loads(finish(child(SCRIPT, root, count, kind, *faults)))
    return found


def require_sound(root: Path, entries: int) -> None:
    store = Store(root)
    report = store.verify()
    assert report.bad == []
    assert (report.entries, report.blobs) == (entries, entries + 1)
    assert files_below(store.layout.temporaries) == []
    assert files_below(store.layout.quarantine) == []


def test_processes_that_want_one_key_build_it_once(tmp_path: Path) -> None:
    assert crowd(tmp_path / "store", "one") == {"built": 1, "hits": COUNT - 1, "builds": 1}
    require_sound(tmp_path / "store", 1)


@full
def test_processes_that_want_many_keys_build_each_once(tmp_path: Path) -> None:
    assert crowd(tmp_path / "store", "many") == {"built": COUNT, "hits": 0, "builds": COUNT}
    assert crowd(tmp_path / "store", "many") == {"built": 0, "hits": COUNT, "builds": 0}
    require_sound(tmp_path / "store", COUNT)


@default_cases(1)
@pytest.mark.parametrize(("kind", "entries"), [("one", 1), ("many", COUNT)])
def test_all_are_right_where_locks_silently_do_nothing(tmp_path: Path, kind: str, entries: int) -> None:
    found = crowd(tmp_path / "store", kind, "no locks")
    assert found["built"] + found["hits"] == COUNT
    assert found["builds"] >= entries
    require_sound(tmp_path / "store", entries)


def test_a_damaged_blob_is_built_again_once(tmp_path: Path) -> None:
    crowd(tmp_path / "store", "one", count=1)
    store = Store(tmp_path / "store")
    entry = store.lookup(key(batch=0))
    assert entry is not None
    flip(store.path(entry.outputs["graph"]))
    assert crowd(tmp_path / "store", "one") == {"built": 1, "hits": COUNT - 1, "builds": 1}
    assert Store(tmp_path / "store").verify().bad == []


def test_who_finds_damage_late_does_not_throw_out_what_another_has_built_meanwhile(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    old = store.publish(key(), {"graph": store.put_bytes(b"old")})
    new = store.publish(key(), {"graph": store.put_bytes(b"new")})
    store._main.entries.reject(old, "its blob is missing")
    found = store.lookup(key())
    assert found is not None
    assert found.outputs == new.outputs
    store._main.entries.reject(new, "its blob is missing")
    assert store.lookup(key()) is None


@full
def test_a_clock_that_goes_back_at_every_look_changes_nothing(tmp_path: Path) -> None:
    assert crowd(tmp_path / "store", "one", "clock back") == {"built": 1, "hits": COUNT - 1, "builds": 1}
    require_sound(tmp_path / "store", 1)
    assert Counter(entry.key for entry in Store(tmp_path / "store").entries()) == {key(batch=0): 1}
