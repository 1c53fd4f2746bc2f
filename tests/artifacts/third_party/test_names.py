from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.artifacts.third_party.names import path_problem, paths_problem

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
