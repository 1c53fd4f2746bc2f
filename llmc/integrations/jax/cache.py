"""JAX's persistent compilation cache: the folder in JAX_COMPILATION_CACHE_DIR; tpu-inference's in VLLM_XLA_CACHE_PATH.

    <module>-<64 hex>-cache, and <module>-<64 hex>-atime next to it where jax_compilation_cache_max_size is set
    <module>-<64 hex>                                        before JAX 0.4.36

Read in jax/_src/lru_cache.py, compilation_cache.py, cache_key.py and compiler.py of JAX 0.10.2. The key covers program,
options, devices and versions, but only as a hash. The facts are therefore the versions recorded when a cache is packed,
and given values. The key also covers the folder: one of the options is the path of XLA's own cache in it, unless
JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES is "none". Observed with JAX 0.10.2 on CPU: in another folder every look-up
misses. JAX reads no file times; "-atime" has the time as its content.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from llmc.artifacts.third_party.base import Fact, ThirdPartyCache
from llmc.artifacts.third_party.contents import Tree
from llmc.integrations.host import machine_here

CACHE, ATIME = "-cache", "-atime"
_NAME = re.compile(r"(.+-[0-9a-f]{64})(-cache|-atime)?")
_COMPRESSIONS = ((b"\x28\xb5\x2f\xfd", "zstd"), (b"\x78", "zlib"))


class JaxCache(ThirdPartyCache):
    """JAX's executables."""

    name = "jax"
    looks_like = f"JAX keeps MODULE-HASH{CACHE} in the folder that JAX_COMPILATION_CACHE_DIR names"
    variables = ("JAX_COMPILATION_CACHE_DIR", "VLLM_XLA_CACHE_PATH")
    packages = ("jax", "jaxlib", "libtpu", "jax-cuda12-pjrt", "jax-cuda13-pjrt")
    must_match = ("version.*", "path", "machine", "device.name")

    def leaves_out(self, path: str) -> bool:
        return path == ".lockfile" or super().leaves_out(path)

    def unit(self, path: str) -> str:
        """Return one executable, its time of use first; or one of XLA's own caches."""
        match = _NAME.fullmatch(path)
        return match[1] if match is not None and "/" not in path else path.partition("/")[0]

    def entries(self, tree: Tree) -> Iterable[str]:
        return {self.unit(path) for path in tree.files if _is_executable(path)}

    def incomplete(self, tree: Tree) -> Mapping[str, str]:
        """Return empty files, and files that do not begin like compressed data."""
        found = {}
        for path, file in tree.files.items():
            if _is_executable(path):
                if not file.size:
                    found[self.unit(path)] = "is torn (an empty file)"
                elif _compression(tree, path) is None:
                    found[self.unit(path)] = "is not what JAX writes (neither zstd nor zlib)"
        return found

    def facts(self, tree: Tree) -> Iterable[Fact]:
        """Yield the compression of executables, which JAX's key covers."""
        for path in tree.files:
            if _is_executable(path) and (compression := _compression(tree, path)) is not None:
                yield Fact("compression", compression)

    def recorded(self, folder: Path) -> Mapping[str, str]:
        """Return the folder, as JAX was given it."""
        return {"path": str(folder.absolute())}

    def here(self, environment: Mapping[str, str], folder: Path) -> Mapping[str, str]:
        return {"path": str(folder.absolute()), **machine_here()}

    def location(self, environment: Mapping[str, str]) -> str | None:
        return environment.get("JAX_COMPILATION_CACHE_DIR") or environment.get("VLLM_XLA_CACHE_PATH")


def _is_executable(path: str) -> bool:
    match = _NAME.fullmatch(path)
    return match is not None and "/" not in path and match[2] != ATIME


def _compression(tree: Tree, path: str) -> str | None:
    head = tree.head(path, 4)
    return next((name for beginning, name in _COMPRESSIONS if head.startswith(beginning)), None)
