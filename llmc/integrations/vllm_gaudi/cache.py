"""The recipe cache of Gaudi: the folder in PT_HPU_RECIPE_CACHE_CONFIG=<folder>,<delete>,<MiB>.

    <graph>_<device, hex>_syn<version>.recipe, and .metadata next to it

The names are from mcv/pkg/cache/habana.go of redhat-et/GKM (September 2026). Its device is a hash of the Gaudi
libraries and of variables that affect compilation (HabanaAI/gaudi-pytorch-bridge,
habana_serialization/cache_version.h). With another number of KV cache blocks every recipe misses
(HabanaAI/vllm-fork#1054). No file records that number: it is given when the cache is packed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from llmc.artifacts.third_party.base import Fact, ImageForm, ThirdPartyCache
from llmc.artifacts.third_party.contents import Tree
from llmc.errors import InputError
from llmc.integrations import kserve

VARIABLE = "PT_HPU_RECIPE_CACHE_CONFIG"
RECIPE, METADATA = ".recipe", ".metadata"
RECIPE_MIB = 8192
_NAME = re.compile(r"(?:.*/)?(\d+)_([0-9a-f]+)_syn([\d.]+[0-9a-f]*)\.(?:recipe|metadata)")


class GaudiCache(ThirdPartyCache):
    """Gaudi's recipes."""

    name = "gaudi"
    looks_like = f"Gaudi keeps GRAPH_DEVICE_synVERSION{RECIPE} and {METADATA} in the folder that {VARIABLE} names"
    variables = (VARIABLE,)
    packages = ("habana-torch-plugin", "vllm", "vllm-gaudi", "torch")
    must_match = ("version.*", "device", "synapse", "num_hpu_blocks")

    def unit(self, path: str) -> str:
        return path.rpartition(".")[0] if _NAME.fullmatch(path) else path

    def entries(self, tree: Tree) -> Iterable[str]:
        return {self.unit(path) for path in tree.files if path.endswith(RECIPE) and _NAME.fullmatch(path)}

    def incomplete(self, tree: Tree) -> Mapping[str, str]:
        """Return empty files, and recipes or metadata without the other."""
        found = {}
        for path, file in tree.files.items():
            if _NAME.fullmatch(path) is None:
                continue
            unit = self.unit(path)
            other = unit + (METADATA if path.endswith(RECIPE) else RECIPE)
            if not file.size:
                found[unit] = f"is torn ({path.rpartition('/')[2]} is empty)"
            elif other not in tree.files:
                found[unit] = f"is not complete (no {other.rpartition('/')[2]})"
        return found

    def facts(self, tree: Tree) -> Iterable[Fact]:
        """Yield device and version from the names."""
        for path in tree.files:
            if (match := _NAME.fullmatch(path)) is not None:
                yield Fact("device", match[2])
                yield Fact("synapse", match[3])

    def location(self, environment: Mapping[str, str]) -> str | None:
        """Return the folder. Raises InputError where the server deletes it at start."""
        config = environment.get(VARIABLE)
        if config is None:
            return None
        folder, delete, *_ = [*(part.strip() for part in config.split(",")), ""]
        if delete.lower() in {"true", "1"}:
            raise InputError(
                f"{VARIABLE}={config}: the second field makes the server delete {folder} at its start; set it to false"
            )
        return folder or None

    def image(self, tree: Tree, facts: Mapping[str, str], entries: Collection[str]) -> ImageForm:
        return kserve.image(
            "habana", tree, entries, [{"backend": "hpu", "arch": "", "warp_size": 0}], framework="habana",
            cache_type="habana-recipe", cache_root_env=f"{VARIABLE}={kserve.HOME}/habana,false,{RECIPE_MIB}",
            cache_mount_subpath=".",
        )  # fmt: skip
