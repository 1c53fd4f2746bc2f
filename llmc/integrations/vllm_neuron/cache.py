"""The compile cache of vLLM's Neuron plug-in: VLLM_CACHE_ROOT/neuron/compile_cache.

    <hash>/graph.hlo, graph_<hash>.neff, command.txt, log-neuron-cc.txt, .artifact_metadata_v0.json
    <hash>/.compilation_complete    "completed:<seconds>\\nneff_size:<bytes>\\n", written last: without it the plug-in
                                    compiles again

libtorch_neuronx_lite (Neuron SDK 2.32 and 2.33: compile/cache.py, backend.py, parallel_compile.py), as described in
public projects that read these folders. The key of a folder covers the graph and the compiler's arguments, and not the
compiler's version: that is a fact here.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from llmc.artifacts.third_party.base import Fact, ThirdPartyCache
from llmc.artifacts.third_party.contents import Tree

POSITION = ("neuron", "compile_cache")
COMPLETE, COMMAND, LOG = ".compilation_complete", "command.txt", "log-neuron-cc.txt"
METADATA = re.compile(r"\.artifact_metadata_v(\d+)\.json")
_SIZE = re.compile(rb"^neff_size:(\d+)$", re.MULTILINE)
_COMPILER = re.compile(rb"NeuronX Compiler version ([\w.+]+)")
_FIXED = frozenset({"--framework", "--output", "--logfile", "--target"})


class VllmNeuronCache(ThirdPartyCache):
    """The plug-in's NEFF files."""

    name = "vllm-neuron"
    looks_like = f"the plug-in keeps HASH/graph_HASH.neff and HASH/{COMPLETE} in VLLM_CACHE_ROOT/{'/'.join(POSITION)}"
    variables = ("VLLM_CACHE_ROOT", "XDG_CACHE_HOME", "HOME", "NEURON_PLATFORM_TARGET_OVERRIDE")
    packages = ("neuronx-cc", "vllm", "vllm-neuron", "torch", "torch-neuronx", "libtorch-neuronx-lite")
    must_match = ("version.*", "target", "compiler")

    def root(self, folder: Path) -> Path:
        """Return the root; `folder` may be the VLLM_CACHE_ROOT."""
        return below if (below := folder.joinpath(*POSITION)).is_dir() else folder

    def unit(self, path: str) -> str:
        return path.partition("/")[0]

    def entries(self, tree: Tree) -> Iterable[str]:
        return {self.unit(path) for path in tree.files if path.partition("/")[2] == COMPLETE}

    def incomplete(self, tree: Tree) -> Mapping[str, str]:
        """Return folders without the mark, or whose NEFF size differs from the mark's."""
        graphs = {self.unit(path) for path in (*tree.files, *tree.folders) if self._is_graph(path, tree)}
        found = {}
        for graph in sorted(graphs):
            if f"{graph}/{COMPLETE}" not in tree.files:
                found[graph] = f"is not complete (no {COMPLETE}): its compile runs, or failed"
                continue
            size = _SIZE.search(tree.text(f"{graph}/{COMPLETE}"))
            neff = tree.files.get(f"{graph}/graph_{graph}.neff")
            if neff is None:
                found[graph] = "is torn (it has no NEFF)"
            elif size is not None and neff.size != int(size[1]):
                found[graph] = f"is torn (its NEFF has {neff.size} bytes, {COMPLETE} says {int(size[1])})"
        return found

    def facts(self, tree: Tree) -> Iterable[Fact]:
        """Yield target, arguments and version of the compiler, and the format of the metadata."""
        for path in tree.files:
            name = path.partition("/")[2]
            if name == COMMAND:
                yield from _command(tree.text(path).decode(errors="replace"))
            elif name == LOG and (version := _COMPILER.search(tree.head(path, 1 << 20))) is not None:
                yield Fact("compiler", version[1].decode())
            elif (metadata := METADATA.fullmatch(name)) is not None:
                yield Fact("metadata", metadata[1])

    def here(self, environment: Mapping[str, str], folder: Path) -> Mapping[str, str]:
        """Return the target chip, where the environment names it."""
        target = environment.get("NEURON_PLATFORM_TARGET_OVERRIDE")
        return {"target": target} if target else {}

    def location(self, environment: Mapping[str, str]) -> str | None:
        from llmc.integrations.vllm.cache import VllmCache

        root = VllmCache().location(environment)
        return "/".join((root, *POSITION)) if root else None

    def _is_graph(self, path: str, tree: Tree) -> bool:
        """Whether a path is in a graph's folder, or is such a folder itself."""
        return "/" in path or path in tree.folders


def _command(text: str) -> Iterator[Fact]:
    """The facts of a compiler's command line: `neuronx-cc compile GRAPH --target T …`."""
    try:
        words = shlex.split(text)[3:]
    except ValueError:
        return
    rest = []
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if name in _FIXED:
            value = value if equals else words.pop(0) if words else ""
            if name == "--target":
                yield Fact("target", value)
        else:
            rest.append(word)
    yield Fact("arguments", " ".join(rest))
