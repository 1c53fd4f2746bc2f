"""Entries of packed caches that come from anywhere: sound, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.artifacts.bundle.trust import code_of_entry
from llmc.artifacts.digest import Blob, digest_bytes
from llmc.artifacts.key import Key
from llmc.artifacts.store.entries import Entry
from llmc.artifacts.third_party.contents import Contents, PackedFile, path_problem, paths_problem, read_contents
from llmc.errors import ArtifactError

BLOB = Blob(digest_bytes(b"x"), 1)


def contents(*paths: str, folders: tuple[str, ...] = (), **changes: Any) -> Contents:
    files = {path: PackedFile(BLOB, executable=False) for path in paths}
    members = {
        "cache": "jax",
        "facts": {"a": "b"},
        "image_folder": "io.jax.cache",
        "image_labels": {},
        "image_files": {},
    }
    return Contents(files=files, folders=folders, **(members | changes))  # type: ignore[arg-type]


def entry(built: Contents) -> Entry:
    return Entry(built.key(), built.outputs(), built.meta(), 0.0, 0.0)


def test_a_sound_one_reads_back() -> None:
    built = contents("a/b", "c", folders=("d",), image_files={"io.x/manifest.json": BLOB})
    assert read_contents(entry(built), "x") == built


@pytest.mark.parametrize("path", ["../../etc/cron.d/x", "/etc/passwd", "a/../b", "", "a\nb", "a//b", "x" * 300])
def test_a_path_that_leaves_the_folder_is_refused(path: str) -> None:
    for built in (contents(path), contents("a", folders=(path,)), contents("a", image_files={path: BLOB})):
        with pytest.raises(ArtifactError, match="a path cannot be created"):
            read_contents(entry(built), "x")
    with pytest.raises(ArtifactError, match="cannot be created"):
        read_contents(entry(contents("a", image_folder=path)), "x")


def test_a_file_that_is_a_folder_too_is_refused() -> None:
    with pytest.raises(ArtifactError, match="'a' is a file, or an empty folder, and has 'a/b' in it"):
        read_contents(entry(contents("a", "a/b")), "x")


@pytest.mark.parametrize(
    "change",
    [
        {"executable": ["a", "a"]}, {"executable": ["b"]}, {"executable": [1]}, {"executable": None}, {"folders": "ab"},
        {"folders": [["a"]]}, {"image": None}, {"image": {"folder": "a"}}, {"more": 1},
        {"image": {"folder": "a", "labels": {"a": 1}}}, {"image": {"folder": "a", "labels": {}, "more": 1}},
    ],
)  # fmt: skip
def test_other_members_are_refused(change: dict[str, Any]) -> None:
    good = entry(contents("a"))
    with pytest.raises(ArtifactError, match="pack the cache again"):
        read_contents(good._replace(meta={**good.meta, **change}), "x")


def test_files_that_the_key_does_not_name_are_refused() -> None:
    good = entry(contents("a"))
    for outputs in ({"tree/a": Blob(digest_bytes(b"y"), 1)}, {**good.outputs, "tree/b": BLOB}, {"other": BLOB}, {}):
        with pytest.raises(ArtifactError, match=r"not what its key says|has an output 'other'"):
            read_contents(good._replace(outputs=outputs), "x")


def test_another_version_of_the_format_says_so() -> None:
    good = entry(contents("a"))
    with pytest.raises(ArtifactError, match="a cache packed in format 2, where this llmc reads 1; pack it again"):
        read_contents(good._replace(meta={**good.meta, "schema": 2}), "x")


def test_another_entry_is_not_a_cache() -> None:
    with pytest.raises(ArtifactError, match="x: a weights, not a packed cache"):
        read_contents(entry(contents("a"))._replace(key=Key("weights", {"a": 1})), "x")


def test_a_packed_cache_counts_as_code_whatever_it_says() -> None:
    for meta in ({}, {"state": "portable"}):
        assert code_of_entry(contents("a").key(), meta) is not None


def test_the_digest_covers_names_content_and_modes(tmp_path: Path) -> None:
    base = contents("a")
    other = Blob(digest_bytes(b"y"), 1)
    changed = [
        contents("b"), contents("a", "b"), contents("a", folders=("b",)),
        base._replace(files={"a": PackedFile(other, executable=False)}),
        base._replace(files={"a": PackedFile(BLOB, executable=True)}),
    ]  # fmt: skip
    assert len({built.key() for built in [base, *changed]}) == 6
    assert base._replace(facts={"a": "c"}).key() != base.key()


PARTS = st.text(st.characters(codec="utf-8"), max_size=8)


@pytest.mark.parametrize("path", ["a", "a/b.so", "jit_f-0/ü", ".compilation_complete", "a b", "x" * 255, "..a", "a.."])
def test_names_that_servers_use_can_be_packed(path: str) -> None:
    assert path_problem(path) is None


LONG = ("x" * 256, "a/" * 600 + "a")
UNPRINTABLE = ("a\nb", "a\x00", "a\x1b[2J", "\udcff", "\u202ea")


@pytest.mark.parametrize(
    "path", ["", "/", "/etc/passwd", "a//b", "a/", "../a", "a/../../b", ".", "a/.", "a\\b", *LONG, *UNPRINTABLE]
)
def test_hostile_names_cannot(path: str) -> None:
    assert path_problem(path) is not None


@given(st.lists(PARTS, max_size=5).map("/".join))
def test_what_is_allowed_stays_in_its_folder(path: str) -> None:
    if path_problem(path) is None:
        assert not path.startswith("/") and path.isprintable()
        assert all(part not in {"", ".", ".."} for part in path.split("/"))


@pytest.mark.parametrize(
    ("files", "folders"),
    [(["a", "a/b"], []), (["a/b/c"], ["a"]), (["a"], ["a"]), ([], ["a", "a/b"]), (["a"], ["../b"])],
)
def test_a_file_is_no_folder(files: list[str], folders: list[str]) -> None:
    assert paths_problem(files, folders) is not None


def test_files_and_empty_folders_side_by_side() -> None:
    assert paths_problem(["a/b", "a/c", "ab"], ["a/d", "e"]) is None
