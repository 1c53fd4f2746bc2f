"""The user's store, as the settings describe it: whether native code is used from it."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from llmc.artifacts.local.opening import _warn_of_writers, open_store
from llmc.artifacts.store.store import Store
from llmc.artifacts.store.workspace import Workspace
from llmc.errors import ArtifactError
from llmc.settings import Settings
from tests.artifacts.helpers import key

CODE, DATA = key("kernels", state="native"), key("trace")


@pytest.fixture(autouse=True)
def _anew() -> None:
    _warn_of_writers.cache_clear()


def opened(root: Path, *shared: Path, trusted: tuple[str, ...] = ()) -> Store:
    return open_store(root, Settings(shared_caches=tuple(map(str, shared)), trusted_folders=trusted))


def build(space: Workspace) -> dict[str, object]:
    return {"library": space.put_bytes(b"\x7fELF")}


@pytest.mark.parametrize("below", ["", "v1"])
@pytest.mark.parametrize("tier", ["own", "shared"])
def test_a_store_that_everybody_may_write_is_reported_once_and_its_native_code_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, below: str, tier: str
) -> None:
    root = tmp_path / "store"
    Store(root).build(CODE, build)
    Store(root).build(DATA, build)
    (root / below).chmod(0o777)
    locations = (root,) if tier == "own" else (tmp_path / "mine", root)
    opened(*locations)
    store = opened(*locations)
    (message,) = caplog.messages
    problem = f"{root / below} can be written by every user (mode 777); chmod go-w {root / below}, or name the folder"
    assert message.startswith(f"{root}: others may change this store, so native code is not used from it: {problem}")
    for use in (store, pickle.loads(pickle.dumps(store))):
        for key_ in (CODE, key("kernels", state="native", more=1)):
            with pytest.raises(ArtifactError) as raised:
                use.get_or_build(key_, build)
            assert str(raised.value).startswith(f"{root}: no native code is used from this store")
            assert problem in str(raised.value)
        assert use.lookup(DATA) is not None, "data is used"
    assert opened(*locations, trusted=(str(root),)).lookup(CODE) is not None
    (root / below).chmod(0o755)
    assert store.lookup(CODE) is not None


@pytest.mark.parametrize("file", ["entry", "blob"])
def test_native_code_in_a_file_that_others_may_change_is_refused(tmp_path: Path, file: str) -> None:
    """As of a store that was open to all once."""
    entry = Store(tmp_path).build(CODE, build)
    layout = Store(tmp_path).layout
    path = layout.entry("kernels", CODE.hex) if file == "entry" else layout.blob(entry.outputs["library"].digest)
    path.chmod(0o666)
    with pytest.raises(ArtifactError, match=rf"{path} can be written by every user \(mode 666\)"):
        opened(tmp_path).get_or_build(CODE, build)
    assert opened(tmp_path).get_or_build(key("kernels", state="native", more=1), build)[1] is False


def test_what_says_only_in_its_entry_that_it_is_code_is_code(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.publish(DATA, {"library": store.put_bytes(b"\x7fELF")}, {"state": "native"})
    store.layout.base.chmod(0o777)
    with pytest.raises(ArtifactError, match="no native code is used from this store"):
        opened(tmp_path).lookup(DATA)


@pytest.mark.parametrize("mode", [0o755, 0o1777])
def test_others_are_opened_in_silence(tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int) -> None:
    opened(tmp_path / "not there yet")
    (tmp_path / "store").mkdir()
    (tmp_path / "store").chmod(mode)
    opened(tmp_path / "store").get_or_build(CODE, build)
    assert opened(tmp_path / "store").get_or_build(CODE, build)[1] is True
    assert caplog.messages == []


@pytest.mark.full
@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_store_that_another_user_began_in_a_folder_for_all_is_refused(tmp_path: Path) -> None:
    Store(tmp_path / "store").build(CODE, build)
    (tmp_path / "store").chmod(0o1777)
    os.chown(tmp_path / "store" / "v1", 54321, 54321)
    with pytest.raises(ArtifactError, match="store/v1 belongs to user 54321; make it the user's that runs llmc"):
        opened(tmp_path / "store").get_or_build(CODE, build)


@pytest.mark.full
@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_shared_store_may_be_another_s_who_alone_may_write_it(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    Store(shared).build(CODE, build)
    for folder, folders, files in os.walk(shared):
        for name in (".", *folders, *files):
            os.chown(Path(folder, name), 54321, 54321)
    assert opened(tmp_path / "mine", shared).get_or_build(CODE, build)[1] is True
    (shared / "v1" / "entries").chmod(0o777)
    with pytest.raises(ArtifactError, match=r"shared/v1/entries can be written by every user"):
        opened(tmp_path / "mine", shared).get_or_build(CODE, build)
