from __future__ import annotations

from pathlib import Path

import pytest

from llmc.artifacts.third_party.base import merge
from llmc.artifacts.third_party.contents import Tree, scan_tree
from llmc.errors import InputError
from llmc.integrations.vllm_gaudi.cache import VARIABLE, GaudiCache
from tests.artifacts.third_party.helpers import RECIPE, make_gaudi, write

CACHE = GaudiCache()


def tree(root: Path) -> Tree:
    return scan_tree(root, CACHE.leaves_out)


def test_names_say_device_and_version(tmp_path: Path) -> None:
    make_gaudi(tmp_path)
    assert merge(CACHE.facts(tree(tmp_path))) == {"device": "0a1b2c", "synapse": "1.22.0.638"}
    assert set(CACHE.entries(tree(tmp_path))) == {RECIPE}


def test_a_recipe_and_its_metadata_are_one_part(tmp_path: Path) -> None:
    make_gaudi(tmp_path)
    make_gaudi(tmp_path / "rank1")
    write(tmp_path / "notes", "x")
    assert {CACHE.unit(path) for path in tree(tmp_path).files} == {RECIPE, f"rank1/{RECIPE}", "notes"}


@pytest.mark.parametrize(("lacking", "kept"), [("recipe", "metadata"), ("metadata", "recipe")])
def test_one_without_the_other_is_half_written(tmp_path: Path, lacking: str, kept: str) -> None:
    make_gaudi(tmp_path)
    (tmp_path / f"{RECIPE}.{lacking}").unlink()
    assert CACHE.incomplete(tree(tmp_path)) == {RECIPE: f"is not complete (no {RECIPE}.{lacking})"}
    write(tmp_path / f"{RECIPE}.{lacking}", "x")
    write(tmp_path / f"{RECIPE}.{kept}", "")
    assert CACHE.incomplete(tree(tmp_path)) == {RECIPE: f"is torn ({RECIPE}.{kept} is empty)"}


@pytest.mark.parametrize(
    ("config", "location"),
    [("/a/b,false,8192", "/a/b"), ("/a, False ,1", "/a"), ("/a", "/a"), ("/a,0,1,false", "/a"), (",false,1", None)],
)
def test_where_the_bridge_looks(config: str, location: str | None) -> None:
    assert CACHE.location({VARIABLE: config}) == location


def test_where_it_would_delete_the_cache_nothing_is_put() -> None:
    assert CACHE.location({}) is None
    with pytest.raises(InputError, match="makes the server delete /a at its start; set it to false"):
        CACHE.location({VARIABLE: "/a,True,1024"})
