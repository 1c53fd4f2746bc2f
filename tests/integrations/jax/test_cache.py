from __future__ import annotations

import zlib
from pathlib import Path

import pytest

from llmc.artifacts.third_party.base import compare, merge
from llmc.artifacts.third_party.contents import Tree, scan_tree
from llmc.integrations.jax.cache import JaxCache
from tests.artifacts.third_party.helpers import JAX_KEY, make_jax, write

CACHE = JaxCache()


def tree(root: Path) -> Tree:
    return scan_tree(root, CACHE.leaves_out)


def test_an_executable_and_its_time_of_use_are_one_part(tmp_path: Path) -> None:
    make_jax(tmp_path)
    write(tmp_path / "xla_gpu_per_fusion_autotune_cache_dir" / "x.textproto", "x")
    assert {CACHE.unit(path) for path in tree(tmp_path).files} == {JAX_KEY, "xla_gpu_per_fusion_autotune_cache_dir"}
    assert list(CACHE.entries(tree(tmp_path))) == [JAX_KEY] or set(CACHE.entries(tree(tmp_path))) == {JAX_KEY}


def test_names_of_before_0_4_36_are_known(tmp_path: Path) -> None:
    write(tmp_path / JAX_KEY, zlib.compress(b"x"))
    assert set(CACHE.entries(tree(tmp_path))) == {JAX_KEY}
    assert merge(CACHE.facts(tree(tmp_path))) == {"compression": "zlib"}


def test_other_files_are_no_cache(tmp_path: Path) -> None:
    write(tmp_path / "below" / f"{JAX_KEY}-cache", "x")
    write(tmp_path / "notes", "x")
    write(tmp_path / f"{JAX_KEY}-atime", "x")
    assert set(CACHE.entries(tree(tmp_path))) == set()


@pytest.mark.parametrize(("data", "why"), [(b"", "is torn (an empty file)"), (b"\x00\x00", "is not what JAX writes")])
def test_what_is_torn(tmp_path: Path, data: bytes, why: str) -> None:
    write(make_jax(tmp_path) / f"{JAX_KEY}-cache", data)
    (found,) = CACHE.incomplete(tree(tmp_path)).values()
    assert found.startswith(why)


def test_jaxs_key_covers_the_folder_so_it_is_recorded_and_compared(tmp_path: Path) -> None:
    assert CACHE.recorded(tmp_path) == {"path": str(tmp_path)}
    found = compare({"path": "/cache/jax"}, CACHE.must_match, {}, CACHE.here({}, tmp_path))
    assert [str(item) for item in found.mismatches] == [f"path is /cache/jax in the cache, {tmp_path} here"]


def test_where_jax_and_tpu_inference_look() -> None:
    assert CACHE.location({"JAX_COMPILATION_CACHE_DIR": "/a", "VLLM_XLA_CACHE_PATH": "/b"}) == "/a"
    assert CACHE.location({"VLLM_XLA_CACHE_PATH": "/b"}) == "/b"
    assert CACHE.location({}) is None
