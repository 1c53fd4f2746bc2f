"""Where toolchains keep what they compiled, by their own variables and defaults."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.errors import DeviceError
from llmc.integrations import CACHES, compile_cache
from llmc.integrations.vllm_gaudi import cache as gaudi
from llmc.runtime.nvidia import gpus
from llmc.settings import variables

if TYPE_CHECKING:
    from llmc.settings import Settings

_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "NEURON_COMPILE_CACHE_URL", "CUDA_CACHE_PATH", "HOME")


def cache_places(settings: Settings, device: str) -> dict[str, Path]:
    """The folders, by the cache's name; none lies in another. `device`: the store of whose compiles is among them.

    The rules of JAX, Triton, vLLM, its plug-in for Neuron, and Gaudi's recipes are those of llmc/integrations/. Others:
    torch 2.13, torch/_inductor/runtime/cache_dir_utils.py; awsdocs-neuron.readthedocs-hosted.com 2.29,
    neuron-caching; CUDA C++ programming guide 13, environment variables.
    """
    from llmc.artifacts.store.layout import Layout

    found: dict[str, str | Path | None] = {}
    for name in sorted({*CACHES.names()} - {gaudi.GaudiCache.name}):
        one = compile_cache(name)
        found[name] = one.place(variables(one.variables))
    for recipes in variables([gaudi.VARIABLE]).values():  # also where it deletes them at its start
        found[gaudi.GaudiCache.name] = recipes.partition(",")[0].strip()
    given = variables(_VARIABLES)
    home = Path(given["HOME"]) if "HOME" in given else None
    inductor = given.get("TORCHINDUCTOR_CACHE_DIR")
    found["torch inductor"] = inductor or f"{tempfile.gettempdir()}/torchinductor_{_user()}"
    neuron = given.get("NEURON_COMPILE_CACHE_URL", "/var/tmp/neuron-compile-cache")  # noqa: S108
    found["neuron"] = None if "://" in neuron else neuron
    found["cuda"] = given.get("CUDA_CACHE_PATH") or (home and home / ".nv/ComputeCache")
    store = Layout(settings.cache_dir_for(device))
    found["llmc's blobs"], found["llmc's entries"] = store.blobs, store.entries
    places = {name: Path(folder) for name, folder in found.items() if folder}
    return {
        name: folder for name, folder in places.items() if not any(place in folder.parents for place in places.values())
    }


def unkept() -> str:
    """Why what is compiled here may be in no file: the NVIDIA driver keeps what it makes of PTX unless
    CUDA_CACHE_DISABLE is 1 (CUDA C++ programming guide 13, environment variables); "" without a card."""
    if variables(["CUDA_CACHE_DISABLE"]).get("CUDA_CACHE_DISABLE") != "1":
        return ""
    try:
        cards = bool(gpus())
    except DeviceError:
        cards = True
    return "with CUDA_CACHE_DISABLE=1 the NVIDIA driver keeps what it compiles in no file" if cards else ""


def _user() -> str:
    import getpass
    import re

    try:
        return re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    except (KeyError, ModuleNotFoundError, OSError):
        import os

        return f"uid_{os.getuid()}"
