"""`llmc cache explain` and the reasons of `llmc compile --dry-run` and `-v`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from llmc.artifacts.bundle.reader import BundleFiles
from llmc.artifacts.bundle.stored import add_bundle
from llmc.artifacts.key import Key
from llmc.artifacts.store.store import Store
from llmc.compiler import code
from llmc.runtime.executors.fake import executor as fake
from llmc.testing.toy import write_toy
from tests.artifacts.helpers import key
from tests.cli.helpers import Llmc

OLD, NEW = key(**{"toolchain.onnxruntime": "1.30.0"}), key()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """The store that the commands use."""
    return Store(tmp_path / "cache")


@pytest.fixture
def other(llmc: Llmc, toy: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle of the same toy, made with another version of the fake device."""
    with monkeypatch.context() as patch:
        patch.setattr(fake, "FAKE_VERSION", "1.1")
        limits = ("--max-model-len", 32, "--max-num-seqs", 4)
        assert llmc("compile", toy, "--device", "fake", *limits, "-o", "other", "-q").code == 0
    return here / "other"


def test_a_key_alone_is_compared_with_the_nearest(llmc: Llmc, store: Store) -> None:
    for item in (OLD, NEW, key(batch=9, phase="prompt")):
        store.publish(item, {})
    assert llmc("cache", "explain", NEW.short).out.splitlines() == [
        f"from executable {OLD.digest}, the nearest, to {NEW.digest}:",
        "toolchain.onnxruntime: 1.30.0 → 1.31.1",
    ]
    assert llmc("cache", "explain", NEW.short, "--json").json == {
        "a": OLD.digest, "b": NEW.digest,
        "differences": [{"name": "toolchain.onnxruntime", "a": "1.30.0", "b": "1.31.1"}],
    }  # fmt: skip


def test_code_that_differs_is_named_by_module(
    llmc: Llmc, toy: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compile, change a module, compile again: the whole commands, over a copy of the sources."""
    sources = shutil.copytree(code.ROOT, toy.parent / "llmc", ignore=shutil.ignore_patterns("*.pyc"))
    monkeypatch.setattr(code, "ROOT", sources)
    requested = ("compile", toy, "--device", "fake", "--max-model-len", 32, "--max-num-seqs", 1, "-o", "made", "-q")
    try:
        for name in ("runtime/executors/fake/device.py", "cli/compile.py"):
            code.forget()
            assert llmc(*requested).code == 0
            before = {entry.key.digest for entry in store.entries()}
            (sources / name).write_text((sources / name).read_text() + "EDITED = 1\n")
            code.forget()
            said = llmc(*requested, "--dry-run").out
            assert llmc(*requested).code == 0
            new = [entry.key for entry in store.entries() if not (entry.key.is_local or entry.key.digest in before)]
            if name.startswith("cli/"):
                assert {key.kind for key in new} <= {"bundle"}, "provenance names all sources"
                continue
            assert "code: runtime.executors.fake.device" in said
            for key in (next(key for key in new if key.kind == kind) for kind in ("executable", "verify", "weights")):
                assert llmc("cache", "explain", key.short).out.splitlines()[-1] == "code: runtime.executors.fake.device"
            found = llmc("cache", "explain", key.short, "--json").json["differences"]
            assert found[-1]["modules"] == ["runtime.executors.fake.device"]
    finally:
        code.forget()


def test_a_key_that_is_the_only_one_of_its_kind(llmc: Llmc, store: Store) -> None:
    store.publish(NEW, {})
    store.publish(key("weights"), {})
    assert llmc("cache", "explain", NEW.short).out == f"{store.root} has no other executable to compare it with\n"
    assert llmc("cache", "explain", NEW.short, "--json").json == {"a": None, "b": NEW.digest, "differences": []}


def test_bundles_are_compared_by_what_they_hold_as_folders_or_by_key(
    llmc: Llmc, store: Store, bundle: Path, other: Path
) -> None:
    keys = [add_bundle(store, BundleFiles.open(path)).key for path in (bundle, other)]
    wanted = llmc("cache", "explain", bundle, other).out
    assert wanted.splitlines()[0] == "toolchain.fake: 1.0 → 1.1"
    assert wanted.count("executable[") == 6
    assert llmc("cache", "explain", *(item.short for item in keys)).out == wanted
    assert llmc("cache", "explain", bundle, keys[1].short).out == wanted
    alone = llmc("cache", "explain", other).out.splitlines()
    assert alone[0] == f"from bundle {keys[0].digest}, the nearest, to {other}:"
    assert alone[1:] == wanted.splitlines()


def test_a_bundle_and_something_else_cannot_be_compared(llmc: Llmc, store: Store, bundle: Path) -> None:
    store.publish(NEW, {})
    assert "two keys or two bundles" in llmc("cache", "explain", bundle, NEW.short).failed(2)
    assert "no entry with key" in llmc("cache", "explain", "00000000").failed(5)


def test_of_many_differences_the_first_are_shown(llmc: Llmc, store: Store) -> None:
    one, two = (Key("k", {f"part{i:02}": i * sign for i in range(1, 31)}) for sign in (1, -1))
    for item in (one, two):
        store.publish(item, {})
    lines = llmc("cache", "explain", one.short, two.short).out.splitlines()
    assert len(lines) == 21 and lines[-1] == "and 10 more; --json lists all"
    assert len(llmc("cache", "explain", one.short, two.short, "--json").json["differences"]) == 30


# A compile that would build, or builds


def test_a_dry_run_gives_one_reason_for_all(
    llmc: Llmc, toy: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "FAKE_VERSION", "1.1")
    requested = ("compile", toy, "--device", "fake", "--max-model-len", 32, "--max-num-seqs", 4, "--dry-run")
    *shapes, why, _, total = llmc(*requested).out.splitlines()
    assert why == "why: toolchain.fake: 1.0 → 1.1"
    assert all(line.endswith(": to build") for line in shapes)
    assert total.startswith("6 executables to build, 0 cached")
    assert {e["why"] for e in llmc(*requested, "--json").json["executables"]} == {"toolchain.fake: 1.0 → 1.1"}


def test_a_dry_run_gives_each_its_own_reason_where_they_differ(llmc: Llmc, toy: Path, bundle: Path) -> None:
    ran = llmc("compile", toy, "--device", "fake", "--max-model-len", 40, "--max-num-seqs", 5, "--dry-run")
    reasons = [line.partition(": to build: ")[2] for line in ran.out.splitlines() if ": to build: " in line]
    assert len(set(reasons)) > 1 and all("shape." in reason for reason in reasons)
    assert "why: " not in ran.out


def test_a_dry_run_names_the_stage_that_comes_before(llmc: Llmc, tmp_path: Path, bundle: Path) -> None:
    another = write_toy(tmp_path / "another", seed=5)
    ran = llmc("compile", another, "--device", "fake", "--max-model-len", 32, "--max-num-seqs", 4, "--dry-run")
    (why,) = [line for line in ran.out.splitlines() if line.startswith("why: ")]
    assert why.startswith("why: stage weights has to run: checkpoint: ")


def test_v_shows_the_reason_of_every_miss(toy: Path, bundle: Path, tmp_path: Path, here: Path) -> None:
    from tests.artifacts.helpers import child

    path = toy / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": 128}))
    command = ["compile", str(toy), "--device", "fake", "--max-model-len", "32", "--max-num-seqs", "4", "-v", "-o"]
    process = child(
        "import sys; from llmc.cli.main import main; sys.exit(main(sys.argv[2:]))", "-", *command, here / "b",
        before=("env", f"LLMC_CACHE_DIR={tmp_path / 'cache'}"),
    )  # fmt: skip
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert sum("input.positions: 64 → 128" in line for line in err.splitlines()) == 6
