"""Triton's kernel cache: the folder in TRITON_CACHE_DIR, or .triton/cache in TRITON_HOME or the home folder.

    <key>/__grp__<kernel>.json, <kernel>.json, <kernel>.cubin, …

A group file names the files of a kernel by absolute path, and Triton uses the ones at that path
(python/triton/runtime/cache.py at 10852d2e, FileCacheManager). A cache is therefore only valid in its original folder.
Current vLLM leaves its kernels here, outside VLLM_CACHE_ROOT (mcv/docs/spec-compat.md of redhat-et/GKM, September
2026).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

from llmc.artifacts.third_party.base import Fact, ImageForm, ThirdPartyCache, flatten
from llmc.artifacts.third_party.contents import Tree
from llmc.integrations import kserve
from llmc.integrations.host import machine, machine_here

GROUP = "__grp__"
_TEMPORARY = re.compile(r".*\.lock|lock|tmp\.pid_.*")


class TritonCache(ThirdPartyCache):
    """Triton's kernels."""

    name = "triton"
    looks_like = f"Triton keeps KEY/{GROUP}KERNEL.json in TRITON_CACHE_DIR, or ~/.triton/cache"
    variables = ("TRITON_CACHE_DIR", "TRITON_HOME", "HOME")
    packages = ("triton", "torch")
    must_match = ("version.triton", "path", "machine")

    def leaves_out(self, path: str) -> bool:
        return _TEMPORARY.fullmatch(path.rpartition("/")[2]) is not None

    def unit(self, path: str) -> str:
        return path.partition("/")[0]

    def entries(self, tree: Tree) -> Iterable[str]:
        """Return the folders with a group of files."""
        return {self.unit(path) for path in tree.files if _is_group(path) and path.count("/") == 1}

    def incomplete(self, tree: Tree) -> Mapping[str, str]:
        """Return groups that are not valid JSON."""
        groups = [path for path in tree.files if _is_group(path)]
        return {self.unit(path): "has a torn group file" for path in groups if tree.json_object(path) is None}

    def facts(self, tree: Tree) -> Iterable[Fact]:
        yield from kernel_facts(tree)
        yield from machine(tree)

    def here(self, environment: Mapping[str, str], folder: Path) -> Mapping[str, str]:
        return {"path": str(folder.absolute()), **machine_here()}

    def location(self, environment: Mapping[str, str]) -> str | None:
        if folder := environment.get("TRITON_CACHE_DIR"):
            return folder
        home = environment.get("TRITON_HOME") or environment.get("HOME")
        return f"{home}/.triton/cache" if home else None

    def image(self, tree: Tree, facts: Mapping[str, str], entries: Collection[str]) -> ImageForm:
        return kserve.image("triton", tree, entries, kserve.targets(facts))


def kernel_facts(tree: Tree, below: str = "") -> Iterator[Fact]:
    """Yield the facts of kernels in folders whose path contains `below`.

    The facts are the root that they were written in ("path"), and the compile target ("target.backend", "target.arch"
    and "target.warp_size").
    """
    for path in tree.files:
        if not path.endswith(".json") or below not in path:
            continue
        if _is_group(path):
            if (root := _written_in(tree, path)) is not None:
                yield Fact("path", root)
        elif isinstance(target := (tree.json_object(path) or {}).get("target"), dict):
            yield from flatten("target", {part: target.get(part) for part in ("arch", "backend", "warp_size")})


def _is_group(path: str) -> bool:
    return path.rpartition("/")[2].startswith(GROUP)


def _written_in(tree: Tree, path: str) -> str | None:
    """The root that a tree was written in, from the absolute paths in a Triton group file."""
    group = tree.json_object(path) or {}
    children = group.get("child_paths")
    if not isinstance(children, dict):
        return None
    below = str(PurePosixPath(path).parent)
    for child in children.values():
        folder = str(PurePosixPath(str(child)).parent)
        if folder.endswith("/" + below):
            return folder.removesuffix("/" + below)
    return None
