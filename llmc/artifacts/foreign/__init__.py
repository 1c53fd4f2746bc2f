"""Compile caches of other servers: packed into the store as they are, and put back where their server looks.

    base.py       the contract of a cache, one file per implementation beside it
    names.py      which paths and facts can be packed
    tree.py       the files of a cache in a folder
    facts.py      key facts: what a tree carries, what this host has, how two sets compare
    contents.py   an entry of the store as a packed cache
    packing.py, unpacking.py

Nothing in a cache is executed or unpickled; files are bytes here. What is packed counts as native code everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmc.registry import Registry

if TYPE_CHECKING:
    from llmc.artifacts.foreign.base import ForeignCache

CACHES = Registry(
    "cache",
    "llmc.caches",
    {
        "gaudi": "llmc.artifacts.foreign.gaudi:GaudiCache",
        "jax": "llmc.artifacts.foreign.jax:JaxCache",
        "triton": "llmc.artifacts.foreign.triton:TritonCache",
        "vllm": "llmc.artifacts.foreign.vllm:VllmCache",
        "vllm-neuron": "llmc.artifacts.foreign.vllm_neuron:VllmNeuronCache",
    },
)


def foreign_cache(name: str) -> ForeignCache:
    """The cache of a name. Raises UnknownNameError listing the known ones."""
    cache: ForeignCache = CACHES.get(name)()
    return cache
