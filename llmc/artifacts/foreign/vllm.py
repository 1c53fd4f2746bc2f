"""vLLM's compile cache: torch_compile_cache and torch_aot_compile below VLLM_CACHE_ROOT.

    torch_compile_cache/<10 hex>/rank_<rank>_<dp rank>/[<prefix>/]cache_key_factors.json, …
    torch_compile_cache/torch_aot_compile/<64 hex>/rank_<rank>_<dp rank>/model
    torch_compile_cache/torch_aot_compile/<64 hex>/inductor_cache/…
    torch_aot_compile/<64 hex>/rank_<rank>_<dp rank>/model                    vLLM 0.13 and before

Read in vllm/compilation/backends.py, caching.py and decorators.py of vllm-project/vllm (main of September 2026, which
writes "compiler" and "config" whole, and 00185c66, which writes the latter as a hash) and torch 2.13's
torch/_inductor/codecache.py (CacheBase.get_system). `model` and the artifacts hold pickles, which are never read here.
Triton's group files name their kernels by absolute path (triton/runtime/cache.py): a cache with such files is of use in
the folder alone that it was made in.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

from llmc.artifacts.foreign import kserve
from llmc.artifacts.foreign.base import Fact, ForeignCache, ImageForm
from llmc.artifacts.foreign.facts import flatten
from llmc.artifacts.foreign.host import machine, machine_here, nvidia_card
from llmc.artifacts.foreign.tree import Tree

COMPILED, AOT = "torch_compile_cache", "torch_aot_compile"
FACTORS = "cache_key_factors.json"
MODEL = "model"
GROUP = "__grp__"
_RANK = re.compile(r"rank_\d+_\d+")
_TEMPORARY = re.compile(r".*\.(?:lock|tmp)|tmp\.pid_.*|__pycache__")


class VllmCache(ForeignCache):
    """See base.ForeignCache."""

    name = "vllm"
    looks_like = f"vLLM keeps {COMPILED}/HASH/rank_0_0/… and {COMPILED}/{AOT}/HASH/… in its VLLM_CACHE_ROOT"
    variables = ("VLLM_CACHE_ROOT", "XDG_CACHE_HOME", "HOME")
    packages = ("vllm", "torch", "triton")
    must_match = ("version.*", "compiler*.device.name", "device.name", "machine", "path")

    def root(self, folder: Path) -> Path:
        """See base.ForeignCache. `folder` may be torch_compile_cache itself."""
        if (folder / COMPILED).is_dir():
            return folder
        return folder.parent if folder.resolve().name in {COMPILED, AOT} else folder

    def leaves_out(self, path: str) -> bool:
        """See base.ForeignCache. Other folders of VLLM_CACHE_ROOT hold no compiled code (modelinfos, dummy_cache)."""
        return (
            path.partition("/")[0] not in {COMPILED, AOT} or _TEMPORARY.fullmatch(path.rpartition("/")[2]) is not None
        )

    def unit(self, path: str) -> str:
        """See base.ForeignCache: the folder of one hash."""
        parts = path.split("/")
        depth = 3 if parts[:2] == [COMPILED, AOT] else 2
        return "/".join(parts[:depth])

    def entries(self, tree: Tree) -> Iterable[str]:
        """See base.ForeignCache: hashes of which a rank has something."""
        return {self.unit(path) for path in tree.files if any(map(_RANK.fullmatch, path.split("/")[2:-1]))}

    def incomplete(self, tree: Tree) -> Mapping[str, str]:
        """See base.ForeignCache: factors that are no JSON, and empty models and artifacts."""
        found = {}
        for path, file in tree.files.items():
            name = path.rpartition("/")[2]
            if name == FACTORS and tree.json_object(path) is None:
                found[self.unit(path)] = f"has a torn {FACTORS}"
            elif (name == MODEL or name.startswith("artifact_")) and not file.size:
                found[self.unit(path)] = f"has an empty {name}"
        return found

    def facts(self, tree: Tree) -> Iterable[Fact]:
        """See base.ForeignCache: what vLLM's key is made of, as far as its files say; hashes, ranks and prefixes."""
        for path in tree.files:
            parts = path.split("/")
            yield Fact("aot_hash" if AOT in parts[:2] else "hash", self.unit(path).rpartition("/")[2])
            yield from (Fact("rank", part) for part in parts[2:-1] if _RANK.fullmatch(part))
            name = parts[-1]
            if name == FACTORS and (factors := tree.json_object(path)) is not None:
                yield from _factors(factors)
            elif name.startswith(GROUP) and (root := _written_in(tree, path)) is not None:
                yield Fact("path", root)
        yield from _targets(tree)
        yield from machine(tree)

    def here(self, environment: Mapping[str, str], folder: Path) -> Mapping[str, str]:
        """See base.ForeignCache: the folder, the machine and the card."""
        return {"path": str(folder.resolve()), **machine_here(), **nvidia_card()}

    def place(self, environment: Mapping[str, str]) -> str | None:
        """See base.ForeignCache (vllm/envs.py)."""
        if root := environment.get("VLLM_CACHE_ROOT"):
            return root
        if base := environment.get("XDG_CACHE_HOME"):
            return f"{base}/vllm"
        return f"{home}/.cache/vllm" if (home := environment.get("HOME")) else None

    def image(self, tree: Tree, facts: Mapping[str, str], entries: Collection[str]) -> ImageForm:
        """See base.ForeignCache."""
        return kserve.vllm_image(tree, facts, entries)


def _factors(factors: Mapping[str, object]) -> Iterator[Fact]:
    for name, value in factors.items():
        if name == "code" and isinstance(value, list):
            for item in value:
                if isinstance(item, dict) and isinstance(item.get("path"), str):
                    yield Fact(f"code[{item['path']}]", str(item.get("hash", "")))
        else:
            yield from flatten(name, value)


def _written_in(tree: Tree, path: str) -> str | None:
    """The root that a tree was written in, by the absolute paths in a group file of Triton."""
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


def _targets(tree: Tree) -> Iterator[Fact]:
    """What Triton's kernels were compiled for: backend, architecture and warp size, from their metadata."""
    for path in tree.files:
        name = path.rpartition("/")[2]
        if not name.endswith(".json") or name.startswith(GROUP) or "/triton" not in path:
            continue
        target = (tree.json_object(path) or {}).get("target")
        if isinstance(target, dict):
            yield from flatten("target", {part: target.get(part) for part in ("arch", "backend", "warp_size")})
