"""Gaudi's recipes in a bundle: put on a local disk before the bridge is imported, and refused when they are torn."""

from __future__ import annotations

import logging
import os
import stat
import sys
import types
from pathlib import Path

import pytest

from llmc.artifacts.bundle.reader import BundleFiles, blob_path
from llmc.artifacts.bundle.trust import RECIPES, code_of_bundle
from llmc.artifacts.bundle.writer import write_bundle
from llmc.artifacts.digest import Blob, digest_bytes
from llmc.artifacts.store import locks
from llmc.errors import ArtifactError, DeviceError, InputError
from llmc.integrations.vllm_gaudi.cache import VARIABLE
from llmc.runtime.bundle import Bundle
from llmc.runtime.executors.hpu import recipes
from llmc.runtime.executors.hpu.recipes import BRIDGE, Recipes, put_recipes
from llmc.settings import Settings
from tests.artifacts.helpers import CONTENT, manifest

MODE = "torch.compile"
FILES = {
    f"0/{graph}_9_syn1.24.0.{suffix}": f"{graph} {suffix}".encode() for graph in (1, 2)
    for suffix in ("recipe", "metadata")
}  # fmt: skip
"""A cache of two recipes, in the folder of rank 0."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache is an empty folder, and nothing says where recipes lie."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(VARIABLE, "")
    return tmp_path / "cache"


def index(**changes: bytes) -> bytes:
    blobs = {path: Blob(digest_bytes(data), len(data)) for path, data in {**FILES, **changes}.items()}
    return Recipes(blobs, {"synapse": "1.24.0"}).to_bytes()


def bundle_of(folder: Path, listed: bytes | None = None) -> Bundle:
    """A finished bundle with these recipes."""
    listed = index() if listed is None else listed
    content = [*CONTENT.values(), *FILES.values(), listed]
    sources = {}
    for data in content:
        path = folder / "sources" / digest_bytes(data)[7:]
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        sources[digest_bytes(data)] = path
    old = manifest()
    files = {**old.files, RECIPES: digest_bytes(listed)}
    built = manifest(files=files, blobs={digest: path.stat().st_size for digest, path in sources.items()})
    write_bundle(folder / "bundle", built, sources)
    return Bundle(BundleFiles.open(folder / "bundle"), Settings())


def there(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_they_are_put_into_this_users_cache_and_the_bridge_is_reported(tmp_path: Path, own_cache: Path) -> None:
    folder = put_recipes(bundle_of(tmp_path), MODE)
    assert folder is not None and folder.parent == own_cache / "llmc" / "recipes"
    assert there(folder) == FILES
    assert os.environ[VARIABLE] == f"{folder}/,false,8192"
    assert all(path.stat().st_mode & stat.S_IWUSR for path in folder.rglob("*"))


def test_what_is_torn_there_is_replaced_and_the_rest_stays(tmp_path: Path) -> None:
    folder = put_recipes(bundle_of(tmp_path), MODE)
    assert folder is not None
    torn, whole = (folder / path for path in list(FILES)[:2])
    torn.write_bytes(b"to")
    own = folder / "0" / "3_9_syn1.24.0.recipe"
    own.write_bytes(b"compiled here")
    kept = whole.stat().st_ino
    os.environ[VARIABLE] = ""
    put_recipes(bundle_of(tmp_path), MODE)
    assert there(folder) == {**FILES, "0/3_9_syn1.24.0.recipe": b"compiled here"}
    assert whole.stat().st_ino == kept or whole.read_bytes() == FILES[list(FILES)[1]]


def test_the_folder_of_the_variable_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, f"{tmp_path / 'mine'},False,512")
    assert put_recipes(bundle_of(tmp_path), MODE) == tmp_path / "mine"
    assert there(tmp_path / "mine") == FILES
    assert os.environ[VARIABLE] == f"{tmp_path / 'mine'}/,false,8192"


def test_a_folder_that_would_be_deleted_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, f"{tmp_path},true,512")
    with pytest.raises(InputError, match="set it to false"):
        put_recipes(bundle_of(tmp_path), MODE)


def mounted(monkeypatch: pytest.MonkeyPatch, folder: Path, *network: Path) -> None:
    """All is on ext4, but for what is on NFS."""
    lines = [f"1 1 0:1 / {path} rw - {kind} x rw" for path, kind in (("/", "ext4"), *((n, "nfs4") for n in network))]
    table = folder / "mountinfo"
    table.write_text("\n".join(lines))
    monkeypatch.setattr(locks, "MOUNTS", table)


def test_a_cache_on_nfs_is_not_used(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "local").mkdir()
    own_cache.mkdir()
    mounted(monkeypatch, tmp_path, own_cache)
    monkeypatch.setattr(recipes.tempfile, "gettempdir", lambda: str(tmp_path / "local"))
    folder = put_recipes(bundle_of(tmp_path), MODE)
    assert folder is not None and folder.is_relative_to(tmp_path / "local") and there(folder) == FILES
    assert stat.S_IMODE(folder.parent.stat().st_mode) & 0o022 == 0


def test_without_a_local_disk_the_way_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted(monkeypatch, tmp_path, tmp_path, Path(recipes.tempfile.gettempdir()))
    with pytest.raises(DeviceError, match=rf"not known to be on a local disk.*{VARIABLE}=FOLDER,false"):
        put_recipes(bundle_of(tmp_path), MODE)


def test_the_users_own_folder_on_nfs_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mounted(monkeypatch, tmp_path, tmp_path)
    monkeypatch.setenv(VARIABLE, f"{tmp_path / 'mine'},false,512")
    with caplog.at_level(logging.WARNING):
        put_recipes(bundle_of(tmp_path), MODE)
    assert "is not known to be on a local disk" in caplog.text


def test_a_bridge_that_is_there_already_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, BRIDGE, types.ModuleType(BRIDGE))
    with caplog.at_level(logging.WARNING):
        put_recipes(bundle_of(tmp_path), MODE)
        assert "was imported before" in caplog.text
        caplog.clear()
        put_recipes(bundle_of(tmp_path), MODE)
        assert not caplog.text, "the same folder again"


def test_a_cut_recipe_is_refused_by_name(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path)
    path = blob_path(bundle.path, digest_bytes(FILES[next(iter(FILES))]))
    path.unlink()
    path.write_bytes(b"1 rec")
    with pytest.raises(ArtifactError, match="has 5 bytes, expected"):
        put_recipes(bundle, MODE)


def test_a_bundle_without_recipes_needs_none(tmp_path: Path) -> None:
    write_bundle(tmp_path / "bundle", manifest(), sources_of(tmp_path))
    assert put_recipes(Bundle(BundleFiles.open(tmp_path / "bundle"), Settings()), MODE) is None
    assert os.environ[VARIABLE] == ""


def sources_of(folder: Path) -> dict[str, Path]:
    found = {}
    for data in CONTENT.values():
        found[digest_bytes(data)] = folder / digest_bytes(data)[7:]
        found[digest_bytes(data)].write_bytes(data)
    return found


@pytest.mark.parametrize("path", ["../1_9_syn1.recipe", "/etc/1_9_syn1.recipe", "a//b", "", "a/../b"])
def test_a_path_that_leaves_the_folder_is_refused(tmp_path: Path, path: str) -> None:
    listed = Recipes({path: Blob(digest_bytes(FILES[next(iter(FILES))]), 8)}, {}).to_bytes()
    with pytest.raises(ArtifactError, match="is not an index of recipes"):
        put_recipes(bundle_of(tmp_path, listed), MODE)


@pytest.mark.parametrize("listed", [
    b"", b"[]", b"{}", b'{"schema": 2, "facts": {}, "files": {}}', b'{"schema": 1, "facts": [], "files": {"a": "ab"}}',
    b'{"schema": 1, "facts": {"a": 1}, "files": {}}', b'{"schema": 1, "facts": {}, "files": {"a": ["sha256:0", 1]}}',
])  # fmt: skip
def test_what_is_no_index_is_refused(tmp_path: Path, listed: bytes) -> None:
    with pytest.raises(ArtifactError, match="is not an index of recipes"):
        put_recipes(bundle_of(tmp_path, listed), MODE)


def test_recipes_make_a_bundle_native(tmp_path: Path) -> None:
    assert code_of_bundle(bundle_of(tmp_path).manifest) is not None


def test_a_blob_that_the_bundle_does_not_list_is_refused(tmp_path: Path) -> None:
    listed = Recipes({"1_9_syn1.recipe": Blob(digest_bytes(b"elsewhere"), 9)}, {}).to_bytes()
    with pytest.raises(ArtifactError, match="has no blob"):
        put_recipes(bundle_of(tmp_path, listed), MODE)
