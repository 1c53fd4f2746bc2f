"""A real cache of JAX: packed, unpacked elsewhere, and found by JAX again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from llmc.artifacts.store.store import Store
from llmc.artifacts.third_party.packing import pack, unpack
from llmc.integrations import compile_cache
from tests.tiers import full

PROGRAM = """
import jax
counts = {"cache_hits": 0, "cache_misses": 0}
def count(name, **_):
    if (last := name.rpartition("/")[2]) in counts:
        counts[last] += 1
jax.monitoring.register_event_listener(count)
jax.jit(lambda x: x @ x)(jax.numpy.ones((8, 8)))
print(*counts.values())
"""


def hits_and_misses(folder: Path) -> list[int]:
    options = {
        "JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }  # fmt: skip
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**os.environ, **options}, capture_output=True, text=True, check=True
    )
    return [int(number) for number in ran.stdout.split()]


@full
def test_jax_finds_every_executable_of_a_cache_that_was_packed_and_unpacked(tmp_path: Path) -> None:
    folder, cache, store = tmp_path / "cache", compile_cache("jax"), Store(tmp_path / "store")
    _, compiled = hits_and_misses(folder)
    done = pack(store, cache, folder)
    assert compiled == len(done.contents.files) > 0 and done.contents.facts["path"] == str(folder)
    shutil.rmtree(folder)
    unpack(store, cache, done.contents, folder)
    assert hits_and_misses(folder) == [compiled, 0]
