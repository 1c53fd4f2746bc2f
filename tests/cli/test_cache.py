from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from llmc.artifacts.bundle.reader import blob_path
from llmc.artifacts.bundle.writer import write_bundle
from llmc.artifacts.store.store import Store
from llmc.buckets.render.text import size_text
from llmc.cli.cache import app
from llmc.errors import ArtifactError, InputError
from tests.artifacts.helpers import DIGESTS, flip, key, manifest, sources
from tests.cli.cache_runs import data, error, output, run

OLD = key(**{"toolchain.onnxruntime": "1.30.0"})
NEW = key()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "store")
    blob = store.put_bytes(b"graph" * 1000)
    for item in (OLD, NEW):
        store.publish(item, {"graph.onnx": blob}, {"seconds": 1.5})
    store.publish(key("weights", source=DIGESTS["weights"]), {})
    return store


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "bundle", manifest(), sources(tmp_path / "model"))


def test_ls_lists_what_is_stored(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    used = max(entry.used for entry in store.entries())
    monkeypatch.setattr("llmc.cli.cache.common.time.time", lambda: used)  # a slow machine must not make it 1 s ago
    lines = output(store, "ls").splitlines()
    assert lines[0].split() == ["KIND", "KEY", "SIZE", "OWN", "SHARED", "USED", "STATE", "COMPONENTS"]
    (row,) = [line for line in lines if NEW.short in line]
    assert row.split()[:9] == ["executable", NEW.short, "4.883", "KiB", "0", "B", "4.883", "KiB", "0"]
    assert "batch=4 phase=decode state=portable target=fake toolchain.onnxruntime=1.31.1" in row
    assert lines[-1] == f"3 entries; 1 blob, {size_text(store.usage().total)} on disk in {store.root}"


def test_ls_reports_shapes_first_and_digests_of_code_never(store: Store) -> None:
    store.publish(
        key("trace", code="sha256:919d21 compiler.code=d1ce", **{"shape.batch": 2, "option.dtype": "f32"}), {}
    )
    (row,) = [line for line in output(store, "ls", "--kind", "trace").splitlines() if "shape.batch" in line]
    assert "  shape.batch=2 batch=4 phase=decode state=portable target=fake option.dtype=f32 toolchain" in row
    assert "d1ce" not in row


def test_ls_can_be_narrowed_to_a_kind(store: Store) -> None:
    assert [item["kind"] for item in data(store, "ls", "--kind", "weights")["entries"]] == ["weights"]
    assert "0 entries" in output(store, "ls", "--kind", "nothing")


def test_ls_as_json_has_everything(store: Store) -> None:
    found = data(store, "ls")
    assert found["root"] == str(store.root)
    assert found["usage"]["blobs"] == 1
    (entry,) = [item for item in found["entries"] if item["key"] == NEW.digest]
    assert entry["components"] == dict(NEW.components)
    assert entry["outputs"]["graph.onnx"]["size"] == entry["size"] == 5000
    assert entry["meta"] == {"seconds": 1.5}


def test_ls_of_a_store_that_does_not_exist_is_empty(tmp_path: Path) -> None:
    assert "0 entries" in output(Store(tmp_path / "nothing"), "ls")
    assert not (tmp_path / "nothing").exists()


def test_show_a_key_by_its_first_digits(store: Store) -> None:
    text = output(store, "show", NEW.short)
    assert NEW.digest in text
    assert "  toolchain.onnxruntime: 1.31.1" in text
    assert "graph.onnx: sha256:" in text
    assert data(store, "show", NEW.digest)["key"] == NEW.digest


def test_show_a_bundle(store: Store, bundle: Path) -> None:
    text = output(store, "show", bundle)
    assert "2 executables (2 native, 0 portable) for 12 buckets" in text
    assert "decode batch=4 context=2048" in text
    assert "weights.bin" in text
    assert data(store, "show", bundle) == manifest().to_dict()


def test_show_what_is_not_there(store: Store, tmp_path: Path) -> None:
    assert isinstance(error(store, "show", "0000000000"), ArtifactError)
    assert isinstance(error(store, "show", tmp_path / "nothing"), ArtifactError)


def test_verify_a_sound_store_and_bundle(store: Store, bundle: Path) -> None:
    assert output(store, "verify") == f"{store.root}: 1 blob, 4.883 KiB read, 0 damaged\n"
    assert data(store, "verify")["bad"] == []
    assert data(store, "verify", bundle) == {
        "path": str(bundle),
        "blobs": 4,
        "bytes": manifest().size,
        "signature": {"status": "none", "keys": [], "name": None},
        "bad": [],
    }


def test_verify_a_damaged_store_exits_with_5_and_puts_the_damage_aside(store: Store) -> None:
    flip(store.path(store.put_bytes(b"graph" * 1000)))
    result = run(store, "verify", "--json")
    assert isinstance(result.exception, ArtifactError)
    assert result.exception.exit_code == 5
    assert "quarantine" in str(result.exception)
    assert len(json.loads(result.stdout)["bad"]) == 3, "the blob, and two entries that name it"
    assert data(store, "verify")["bad"] == []


def test_verify_a_damaged_bundle_exits_with_5_and_names_the_file(store: Store, bundle: Path) -> None:
    flip(blob_path(bundle, DIGESTS["weights"]))
    found = error(store, "verify", bundle)
    assert isinstance(found, ArtifactError)
    assert "weights.bin" in str(found)


def test_explain_names_the_component_that_differs(store: Store) -> None:
    assert output(store, "explain", OLD.short, NEW.short) == "toolchain.onnxruntime: 1.30.0 → 1.31.1\n"
    assert output(store, "explain", NEW.short, NEW.short) == "no component differs\n"
    assert data(store, "explain", OLD.short, NEW.short)["differences"] == [
        {"name": "toolchain.onnxruntime", "a": "1.30.0", "b": "1.31.1"}
    ]


def test_explain_shows_what_only_one_has(store: Store) -> None:
    other = store.publish(key(quantize=None), {}).key
    assert output(store, "explain", NEW.short, other.short) == "quantize: (absent) → null\n"
    assert data(store, "explain", NEW.short, other.short)["differences"] == [{"name": "quantize", "b": None}]


def test_explain_two_bundles(store: Store, bundle: Path, tmp_path: Path) -> None:
    other = manifest(toolchain={"onnxruntime": "1.32.0"})
    write_bundle(tmp_path / "other", other, sources(tmp_path / "model"))
    text = output(store, "explain", bundle, tmp_path / "other")
    assert text == "toolchain.onnxruntime: 1.31.1 → 1.32.0\n"


def test_explain_a_key_and_a_bundle_is_a_mistake(store: Store, bundle: Path) -> None:
    assert isinstance(error(store, "explain", bundle, NEW.short), InputError)


def test_a_relative_folder_is_a_bundle_too(store: Store, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(bundle.parent)
    assert data(store, "show", "bundle")["device"] == "cpu"
    assert "nothing" in str(error(store, "show", "./nothing"))


def test_the_default_store_is_the_one_of_the_settings(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMC_CACHE_DIR", str(store.root))
    result = CliRunner().invoke(app, ["ls", "--json"])
    assert json.loads(result.stdout)["root"] == str(store.root)


@pytest.mark.parametrize("command", ["ls", "show", "verify", "explain"])
def test_help_has_an_example(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert f"\n    llmc cache {command}" in result.stdout
    assert "--json" in result.stdout
