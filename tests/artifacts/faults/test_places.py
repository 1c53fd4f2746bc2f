"""Stores in odd places: names with spaces, in any script, very long, linked, relative; and other people's stores."""

from __future__ import annotations

import json
import os
import pickle
import tempfile
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmc.artifacts.atomic_write import UnwritableError
from llmc.artifacts.bundle.reader import BundleFiles
from llmc.artifacts.bundle.writer import write_bundle
from llmc.artifacts.digest import Blob
from llmc.artifacts.store.store import Store
from llmc.artifacts.store.workspace import Workspace
from tests.artifacts.faults.test_crowds import COUNT, crowd
from tests.artifacts.helpers import CONTENT, DIGESTS, child, files_below, finish, key, manifest

CAFE = "cafe\N{COMBINING ACUTE ACCENT}"
NAMES = {
    "spaces": " a  b ",
    "composed": unicodedata.normalize("NFC", CAFE),
    "decomposed": unicodedata.normalize("NFD", CAFE),
    "another script": "模型 и модели 🦙",
    "a newline": "a\nb\tc",
    "not unicode": os.fsdecode(b"a\xff\xfeb"),
    "quotes and a percent sign": 'it\'s "100%" $HOME ~',
    "a dash first": "-rf",
    "long": "/".join(["x" * 250] * 12),
}


def build(space: Workspace) -> dict[str, Blob]:
    (space.folder / "graph").write_bytes(b"graph")
    return {"graph": space.put_file(space.folder / "graph")}


def require_works(root: Path | str) -> None:
    entry, hit = Store(root).get_or_build(key(), build)
    assert not hit
    store = Store(root)
    entry, hit = store.get_or_build(key(), build)
    assert hit
    assert store.path(entry.outputs["graph"]).read_bytes() == b"graph"
    store._main.stamps._dirty = True
    store._main.stamps.save()
    assert store.verify().bad == []
    assert [found.key for found in store.entries()] == [key()]


@pytest.mark.parametrize("name", NAMES)
def test_a_store_and_a_bundle_work_under_any_name(tmp_path: Path, name: str) -> None:
    root = tmp_path / NAMES[name]
    require_works(root)
    store = Store(root)
    paths = {DIGESTS[name]: store.path(store.put_bytes(data)) for name, data in CONTENT.items()}
    folder = write_bundle(root.with_name("bundle " + root.name[:9]), manifest(), paths)
    assert BundleFiles.open(folder).verify() == []


def test_two_forms_of_one_name_are_two_stores(tmp_path: Path) -> None:
    """The file system tells them apart, so we do: nothing is normalised."""
    for name in ("composed", "decomposed"):
        require_works(tmp_path / NAMES[name])
    assert len(list(tmp_path.iterdir())) == 2


def test_a_name_too_long_for_the_system_builds_without_a_cache(tmp_path: Path) -> None:
    deep = tmp_path / "/".join(["z" * 249] * 15)
    nearly = deep / ("w" * (4030 - len(str(deep))))
    for root in (tmp_path / "/".join(["x" * 250] * 17), tmp_path / ("y" * 300), nearly):
        store = Store(root)
        entry, hit = store.get_or_build(key(), build)
        assert not hit
        assert store.path(entry.outputs["graph"]).read_bytes() == b"graph"
        assert store.counters["corrupt"] == 0
        with pytest.raises(UnwritableError):
            store.put_bytes(b"more")


def test_a_link_may_be_the_root(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    require_works(tmp_path / "link")
    assert Store(tmp_path / "real").lookup(key()) is not None


def test_a_link_to_itself_as_the_root_builds_without_a_cache(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "loop").symlink_to("loop")
    _, hit = Store(tmp_path / "loop").get_or_build(key(), build)
    assert not hit
    assert "not cached" in caplog.text


def test_a_relative_root_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    store = Store("store")
    monkeypatch.chdir(tmp_path / "elsewhere")
    store.get_or_build(key(), build)
    assert pickle.loads(pickle.dumps(store)).lookup(key()) is not None
    assert Store(tmp_path / "store").lookup(key()) is not None
    assert list((tmp_path / "elsewhere").iterdir()) == []


# Stores of other users

NOBODY = 65534
AS_NOBODY = """
    import json, logging, os, sys, tempfile
    from pathlib import Path
    import filelock
    from llmc.artifacts.atomic_write import UnwritableError
    from tests.artifacts.faults.test_places import NOBODY, build
    from llmc.artifacts.store.store import Store
    from tests.artifacts.helpers import key
    root, user = Path(sys.argv[1]), int(sys.argv[2])
    warnings = []
    logging.getLogger("llmc.artifacts").addHandler(type("H", (logging.Handler,), {
        "emit": lambda self, record: warnings.append(record.getMessage())})())
    if user:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    store = Store(root)
    entry, hit = store.get_or_build(key(), build)
    assert hit and store.path(entry.outputs["graph"]).read_bytes() == b"graph"
    assert not warnings, warnings
    entry, hit = store.get_or_build(key(batch=9), build)
    assert not hit and store.path(entry.outputs["graph"]).read_bytes() == b"graph"
    try:
        store.put_bytes(b"more")
    except UnwritableError as error:
        print(json.dumps({"error": str(error), "warnings": warnings}))
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


def test_a_store_of_another_user_serves_reads_and_builds_without_a_cache(open_folder: Path) -> None:
    """As root this is a user without rights; as anyone else, a store whose modes forbid writing."""
    root = open_folder / "store"
    Store(root).get_or_build(key(), build)
    mine = os.getuid() != 0
    folders = [Path(found) for found, _, _ in os.walk(root)] if mine else []
    before = {path: path.stat().st_mtime_ns for path in files_below(root)}
    for folder in folders:
        folder.chmod(0o555)
    try:
        said = json.loads(finish(child(AS_NOBODY, root, 0 if mine else NOBODY)))
    finally:
        for folder in folders:
            folder.chmod(0o755)
    assert "cannot be written (Permission denied)" in said["error"]
    assert str(root) in said["error"]
    (warning,) = said["warnings"]
    assert "results are not cached" in warning
    assert "Permission denied" in warning
    assert {path: path.stat().st_mtime_ns for path in files_below(root)} == before or mine


@pytest.mark.full
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become several users of one group")
def test_users_of_one_group_share_a_store(open_folder: Path) -> None:
    root = open_folder / "store"
    root.mkdir()
    os.chown(root, 0, 5000)
    root.chmod(0o2775)
    shared = ("umask 002", "user 6000:5000")
    assert crowd(root, "one", *shared) == {"built": 1, "hits": COUNT - 1, "builds": 1}
    assert crowd(root, "many", *shared, count=8) == {"built": 7, "hits": 1, "builds": 7}
    assert len({path.stat().st_uid for path in files_below(root / "v1/blobs")}) > 1
    assert Store(root).verify().bad == []


@pytest.mark.full
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_users_whose_files_the_others_cannot_lock_are_right_all_the_same(open_folder: Path) -> None:
    """With the usual umask a lock belongs to who made it: the others build without it."""
    root = open_folder / "store"
    root.mkdir()
    os.chown(root, 0, 5000)
    root.chmod(0o2775)
    found = crowd(root, "one", "umask 022", "user 6000:5000", count=8)
    assert found["built"] + found["hits"] == 8
    assert Store(root).verify().bad == []
