from __future__ import annotations

from pathlib import Path

import pytest

from llmc.artifacts.store.store import Store
from llmc.artifacts.third_party.base import compare, merge
from llmc.artifacts.third_party.contents import Tree, scan_tree
from llmc.integrations.triton.cache import TritonCache
from tests.artifacts.third_party.helpers import TRITON_KEY, make_triton, packed, write

CACHE = TritonCache()


def tree(root: Path) -> Tree:
    return scan_tree(root, CACHE.leaves_out)


def test_a_kernel_is_the_folder_of_its_key(tmp_path: Path) -> None:
    make_triton(tmp_path)
    write(tmp_path / "tmp.pid_1_2" / "x", "x")
    assert set(CACHE.entries(tree(tmp_path))) == {TRITON_KEY} == {CACHE.unit(path) for path in tree(tmp_path).files}


def test_it_belongs_to_the_folder_in_its_group_files(tmp_path: Path) -> None:
    found = merge(CACHE.facts(tree(make_triton(tmp_path))))
    assert found == {"path": "/cache/triton", "target.arch": "90", "target.backend": "cuda", "target.warp_size": "32"}
    (wrong,) = compare(found, CACHE.must_match, {}, CACHE.here({}, tmp_path)).mismatches
    assert str(wrong) == f"path is /cache/triton in the cache, {tmp_path} here"


def test_a_torn_group_is_half_written(tmp_path: Path) -> None:
    write(make_triton(tmp_path) / TRITON_KEY / "__grp__k.json", '{"child')
    assert CACHE.incomplete(tree(tmp_path)) == {TRITON_KEY: "has a torn group file"}


@pytest.mark.parametrize(
    ("environment", "location"),
    [
        ({"TRITON_CACHE_DIR": "/a", "HOME": "/b"}, "/a"),
        ({"HOME": "/b"}, "/b/.triton/cache"),
        ({"TRITON_HOME": "/c", "HOME": "/b"}, "/c/.triton/cache"),
        ({}, None),
    ],
)
def test_where_triton_looks(environment: dict[str, str], location: str | None) -> None:
    assert CACHE.location(environment) == location


def test_labels(tmp_path: Path) -> None:
    labels = packed(Store(tmp_path / "store"), "triton", make_triton(tmp_path / "c")).image_labels
    assert labels["cache.triton.image/summary"] == '{"targets":[{"backend":"cuda","arch":"90","warp_size":32}]}'
    assert labels["cache.triton.image/entry-count"] == "1"
