"""`llmc cache gc|rm|pin|unpin`, the space columns of `ls`, and what `llmc compile` trims."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from llmc.artifacts.bundle.manifest import read_manifest
from llmc.artifacts.store.layout import Layout
from llmc.artifacts.store.store import Store
from tests.artifacts.helpers import files_below, key
from tests.cli.helpers import Llmc

HOUR = 3600.0


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "cache")


@pytest.fixture
def filled(layout: Layout) -> Layout:
    """Three entries that share a blob: the first one was used longest ago."""
    store = Store(layout.root)
    shared = store.put_bytes(b"weights" * 3000)
    for batch in (1, 2, 3):
        own = store.put_bytes(bytes([batch]) * 10_000)
        store.publish(key(batch=batch), {"graph": own, "weights": shared})
    for batch in (1, 2, 3):
        moment = time.time() - (10 - batch) * 24 * HOUR
        os.utime(layout.entry("executable", key(batch=batch).hex), (moment, moment))
    return layout


def batches(layout: Layout) -> set[object]:
    return {entry.key.components["batch"] for entry in Store(layout.root).entries("executable")}


def test_gc_without_limits_removes_garbage_only(llmc: Llmc, filled: Layout) -> None:
    Store(filled.root).put_bytes(b"garbage")
    for _, item in filled.all_blobs():
        os.utime(item.path, (time.time() - 2 * HOUR,) * 2)
    assert llmc("cache", "gc").out.startswith(f"removed 1 blob, 7 B; left in {filled.root}: ")
    assert llmc("cache", "gc").out.startswith("nothing to remove; ")
    assert batches(filled) == {1, 2, 3}


def test_gc_trims_to_a_size(llmc: Llmc, filled: Layout) -> None:
    found = llmc("cache", "gc", "--max-size", "32.5k", "--json").json
    assert (found["entries"], found["blobs"], found["over"]) == (2, 2, 0)
    assert found["after"] <= 32_500
    assert batches(filled) == {3}
    assert found["root"] == str(filled.root)


def test_gc_trims_to_an_age(llmc: Llmc, filled: Layout) -> None:
    assert "removed 1 entry, 1 blob, " in llmc("cache", "gc", "--max-age", "8.5d").out
    assert batches(filled) == {2, 3}


def test_rm_removes_an_entry_and_what_no_other_needs(llmc: Llmc, filled: Layout) -> None:
    Store(filled.root).put_bytes(b"garbage")
    first, second, third = (key(batch=batch).hex[:12] for batch in (1, 2, 3))
    before = files_below(filled.root)
    assert "would remove 1 entry, 1 blob, " in llmc("cache", "rm", second, "--dry-run").out
    assert files_below(filled.root) == before
    assert "removed 1 entry, 1 blob, " in llmc("cache", "rm", second).out
    assert batches(filled) == {1, 3}
    assert llmc("cache", "rm", first, third, "--json").json["blobs"] == 3
    assert batches(filled) == set() and len(list(filled.all_blobs())) == 1, "garbage is the collection's"


def test_rm_leaves_what_is_pinned_in_use_or_not_there(llmc: Llmc, filled: Layout) -> None:
    llmc("cache", "pin", key(batch=1).hex)
    user = Store(filled.root)
    assert user.lookup(key(batch=2)) is not None
    said = llmc("cache", "rm", key(batch=1).hex, key(batch=2).hex).failed(5)
    assert said.endswith("not removed: 1 in use, 1 pinned")
    assert "no entry with key 0123456789" in llmc("cache", "rm", "0123456789").failed(5)
    assert "is too short: give 4 digits or more" in llmc("cache", "rm", "012").failed(5)
    assert "name the KEY or BUNDLE to remove" in llmc("cache", "rm").failed(2)
    assert batches(filled) == {1, 2, 3}


def test_a_dry_run_removes_nothing_and_says_so(llmc: Llmc, filled: Layout) -> None:
    before = files_below(filled.root)
    said = llmc("cache", "gc", "--max-size", "0", "--dry-run").out
    assert said.startswith("would remove 3 entries, 4 blobs, ")
    assert f"; would be left in {filled.root}: 0 B" in said
    assert files_below(filled.root) == before


def test_gc_says_what_stays_and_why(llmc: Llmc, filled: Layout) -> None:
    assert llmc("cache", "pin", key(batch=1).short).code == 0
    user = Store(filled.root)
    assert user.lookup(key(batch=2)) is not None
    said = llmc("cache", "gc", "--max-size", "0").out
    assert "kept despite the limits: 1 in use, 1 pinned\n" in said
    assert "over the limit\n" in said
    assert batches(filled) == {1, 2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--max-size", "big"), "--max-size 'big' is not a size such as 512MiB or 8GB"),
        (("--max-age", "30 moons"), "--max-age '30 moons' is not a time such as 90s, 30m, 1.5h or 30d"),
    ],
)
def test_limits_that_cannot_be_read_are_usage_errors(llmc: Llmc, arguments: tuple[str, ...], message: str) -> None:
    assert llmc("cache", "gc", *arguments).failed(2) == message


def test_gc_of_a_store_that_does_not_exist(llmc: Llmc, layout: Layout) -> None:
    assert llmc("cache", "gc", "--max-size", "0").code == 0
    assert not layout.root.exists()


def test_gc_of_a_store_that_cannot_be_written(llmc: Llmc, layout: Layout) -> None:
    layout.base.mkdir(parents=True)
    layout.temporaries.write_text("a file, where a folder should be")
    assert "cannot be written" in llmc("cache", "gc").failed(5)


def test_pins_are_built_listed_and_taken_back(llmc: Llmc, filled: Layout) -> None:
    assert llmc("cache", "pin").out == f"0 pinned in {filled.root}\n"
    short = key(batch=1).short
    assert llmc("cache", "pin", short, key(batch=2).digest).out.splitlines()[-1] == f"2 pinned in {filled.root}"
    pins = llmc("cache", "pin", "--json").json["pins"]
    assert {(pin["kind"], pin["key"], pin["present"]) for pin in pins} == {
        ("executable", key(batch=batch).digest, True) for batch in (1, 2)
    }
    llmc("cache", "gc", "--max-size", "0")
    assert batches(filled) == {1, 2}
    assert len(llmc("cache", "unpin", short, "--json").json["pins"]) == 1
    llmc("cache", "gc", "--max-size", "0")
    assert batches(filled) == {2}


def test_pins_of_what_is_not_there(llmc: Llmc, filled: Layout) -> None:
    assert "no entry with key 00000000" in llmc("cache", "pin", "00000000").failed(5)
    assert "is not pinned" in llmc("cache", "unpin", "00000000").failed(5)
    assert "too short" in llmc("cache", "unpin", "00").failed(5)
    assert llmc("cache", "unpin").code == 2
    llmc("cache", "pin", key(batch=1).short)
    filled.entry("executable", key(batch=1).hex).unlink()
    assert "not in the store" in llmc("cache", "pin").out


def test_a_bundle_is_pinned_by_its_folder(llmc: Llmc, bundle: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    assert llmc("cache", "pin", bundle, "--cache-dir", other).code == 0
    (entry,) = Store(other).entries("bundle")
    assert entry.key.components["manifest"] == read_manifest(bundle).digest
    llmc("cache", "gc", "--max-size", "0", "--cache-dir", other)
    assert Store(other).lookup(entry.key, verify=True) is not None
    assert llmc("cache", "unpin", bundle, "--cache-dir", other).out.startswith("0 pinned")


def test_ls_reports_own_from_shared_and_what_is_kept(llmc: Llmc, filled: Layout) -> None:
    llmc("cache", "pin", key(batch=1).short)
    user = Store(filled.root)
    assert user.lookup(key(batch=2)) is not None
    found = {entry["key"]: entry for entry in llmc("cache", "ls", "--json").json["entries"]}
    first, second = found[key(batch=1).digest], found[key(batch=2).digest]
    assert (first["size"], first["own"], first["shared"]) == (31_000, 10_000, 21_000)
    assert (first["pinned"], first["in_use"]) == (True, False)
    assert (second["pinned"], second["in_use"]) == (False, True)
    (row,) = [line for line in llmc("cache", "ls").out.splitlines() if key(batch=1).short in line]
    assert "30.27 KiB  9.766 KiB  20.51 KiB  9 d" in row
    assert "pinned" in row


def test_ls_of_bundles_says_what_they_are(llmc: Llmc, bundle: Path) -> None:
    lines = llmc("cache", "ls", "--kind", "bundle").out.splitlines()
    assert lines[1].endswith(" for fake, 6 executables")
    assert lines[1].startswith("bundle  ")


def test_compile_trims_the_store_to_its_limit(
    llmc: Llmc, toy: Path, filled: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMC_CACHE_MAX_SIZE", "1k")
    arguments = (
        "compile",
        toy,
        "--device",
        "fake",
        "--max-model-len",
        32,
        "--max-num-seqs",
        4,
        "-o",
        "bundle",
        "--json",
    )
    built = llmc(*arguments)
    assert built.json["built"] == 6
    (line,) = [line for line in built.err.splitlines() if line.startswith("LLMC_CACHE_MAX_SIZE: removed 3 entries")]
    assert "in use" in line
    again = llmc(*arguments)
    assert again.json["reused"] == 6, "what the compile used was in use"


def test_compile_within_the_limit_says_nothing(llmc: Llmc, toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMC_CACHE_MAX_SIZE", "1GiB")
    built = llmc("compile", toy, "--device", "fake", "--max-model-len", 16, "--max-num-seqs", 1, "-o", "bundle")
    assert built.code == 0
    assert "LLMC_CACHE_MAX_SIZE" not in built.err


def test_a_compile_does_not_fail_because_of_trimming(llmc: Llmc, toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmc.errors import CapacityError

    def fail(*_: object, **__: object) -> None:
        raise CapacityError("no room for the clock")

    monkeypatch.setenv("LLMC_CACHE_MAX_SIZE", "1k")
    monkeypatch.setattr("llmc.artifacts.gc.collect", fail)
    built = llmc("compile", toy, "--device", "fake", "--max-model-len", 16, "--max-num-seqs", 1, "-o", "bundle")
    assert built.code == 0
    assert "LLMC_CACHE_MAX_SIZE: the store was not trimmed: no room for the clock" in built.err


def test_a_limit_that_cannot_be_read_fails_before_the_compile(
    llmc: Llmc, toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMC_CACHE_MAX_SIZE", "plenty")
    said = llmc("compile", toy, "--device", "fake", "-o", "bundle").failed(2)
    assert said == "LLMC_CACHE_MAX_SIZE 'plenty' is not a size such as 512MiB or 8GB"


@pytest.mark.parametrize("command", ["gc", "pin", "unpin", "ls"])
def test_help_has_an_example(llmc: Llmc, command: str) -> None:
    said = llmc("cache", command, "--help")
    assert f"\n    llmc cache {command}" in said.out
    assert "--json" in said.out


def test_json_is_one_document(llmc: Llmc, filled: Layout) -> None:
    assert set(json.loads(llmc("cache", "gc", "--json").out)) >= {"freed", "linked", "kept", "failed", "dry_run"}
