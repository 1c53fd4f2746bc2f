"""What was written by an earlier llmc is read, to the byte, by this one, and nothing read is ever run (P10, P12)."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest

import llmc.artifacts
from llmc.artifacts.bundle.stored import KIND, read_bundle
from llmc.artifacts.key import Key
from llmc.artifacts.store import layout
from llmc.artifacts.store.entries import encode_entry
from llmc.artifacts.store.store import Store
from tests.artifacts.helpers import files_below, manifest

KEY = Key("executable", {"toolchain.onnxruntime": "1.31.1", "phase": "decode", "batch": 4})
GOLDEN = Path(__file__).parents[2] / "data" / "golden" / "v1" / "signed"
"""A store as llmc 0.1.0 wrote it. Never change it: a new layout is a new folder beside "v1" (layout.SCHEMA)."""

UNSAFE = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "jsonpickle", "yaml", "joblib"}
RUNS = {"eval", "exec", "compile", "__import__"}
SOURCES = sorted(Path(llmc.artifacts.__file__).parent.rglob("*.py"))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    shutil.copytree(GOLDEN, tmp_path / "store")
    return Store(tmp_path / "store")


def test_a_store_of_the_first_schema_is_read(store: Store) -> None:
    entry = store.lookup(KEY, verify=True)
    assert entry is not None
    assert store.get_bytes(entry.outputs["graph"].digest) == b"graph"
    assert store.get_bytes(entry.outputs["notes"].digest) == b""
    assert entry.meta == {"seconds": 2.5, "name": "modèle"}
    assert entry.created == 1_750_000_000.25
    assert entry.signature == {"payload": "e30=", "payloadType": "text/plain", "signatures": []}
    assert store.verify().bad == []


def test_a_bundle_of_the_first_schema_is_read(store: Store) -> None:
    (entry,) = store.entries(KIND)
    assert read_bundle(store, entry) == (manifest(executables=[], files={}, blobs={}), None)


def test_the_same_store_is_written_to_the_byte(store: Store) -> None:
    for entry in store.entries():
        assert encode_entry(entry) == store.layout.entry(entry.key.kind, entry.key.hex).read_bytes()
    for blob in files_below(GOLDEN / "v1" / "blobs"):
        written = store.put_bytes(blob.read_bytes())
        assert store.path(written).relative_to(store.root) == blob.relative_to(GOLDEN)


def test_another_schema_is_another_folder(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path: path.read_bytes() for path in files_below(GOLDEN)}
    monkeypatch.setattr(layout, "SCHEMA", layout.SCHEMA + 1)
    newer = Store(store.root)
    assert newer.lookup(KEY) is None
    newer.get_or_build(KEY, lambda space: {"graph": space.put_bytes(b"other")})
    monkeypatch.undo()
    entry = Store(store.root).lookup(KEY, verify=True)
    assert entry is not None
    assert store.get_bytes(entry.outputs["graph"].digest) == b"graph"
    assert {path: (store.root / path.relative_to(GOLDEN)).read_bytes() for path in before} == before


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_nothing_that_is_read_is_run(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not UNSAFE & {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").partition(".")[0] not in UNSAFE
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in RUNS
