"""Gaudi's recipe cache in a target-compiled bundle, copied to a local disk before the bridge is imported.

    "recipes.json" = {"schema": 1, "facts": {name: text}, "files": {path: [digest, bytes], …}}

Files are blobs of the bundle, by digest; paths are relative to the cache's folder. The bridge reads
PT_HPU_RECIPE_CACHE_CONFIG=<folder>,<delete>,<MiB> when it creates its cache. It uses <folder> as a name prefix (in
inference mode it appends the rank), locks files there with flock, writes them in its own thread, and recompiles what it
cannot read, with a warning in its own log (HabanaAI/gaudi-pytorch-bridge, habana_serialization/
recipe_cache_config.cpp, recipe_cache.cpp, backend/kernel/hpu_recipe_cache.cpp; 2024 to 2026). <folder> therefore ends
in "/" and is on a local disk. Captured HPU graphs are not in files; they are captured again at each start.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.artifacts.atomic_write import make_folder
from llmc.artifacts.bundle.manifest import BUILT_FOR
from llmc.artifacts.bundle.trust import RECIPES
from llmc.artifacts.digest import Blob, digest_bytes, is_digest
from llmc.artifacts.key import canonical_json
from llmc.artifacts.ownership import is_own
from llmc.artifacts.store.locks import is_local
from llmc.artifacts.third_party.contents import Contents, PackedFile, paths_problem
from llmc.artifacts.third_party.packing import unpack
from llmc.errors import ArtifactError, DeviceError
from llmc.integrations.vllm_gaudi.cache import VARIABLE, GaudiCache
from llmc.settings import variables
from llmc.strict_json import loads

if TYPE_CHECKING:
    from llmc.artifacts.bundle.reader import BundleFiles
    from llmc.runtime.bundle import Bundle
    from llmc.settings import Settings

SCHEMA = 1
KV_BLOCKS = "kv_blocks"
"""Bundle option that pins the number of KV cache blocks, each of the plan's block_size tokens. Recipes do not work with
another number (HabanaAI/vllm-fork#1054).
"""

LEAST_MIB = 8192
BRIDGE = "habana_frameworks.torch"
_log = logging.getLogger("llmc")


@dataclass(frozen=True)
class Recipes:
    """The cache's files by path, and what their names state (GaudiCache.facts)."""

    files: Mapping[str, Blob]
    facts: Mapping[str, str]

    @classmethod
    def parse(cls, data: bytes, source: str) -> Recipes:
        """Parse a bundle's file, which is untrusted. Raises ArtifactError."""
        try:
            found = loads(data)
            if found["schema"] != SCHEMA:
                raise ValueError(f"schema {found['schema']!r:.40}, where this llmc reads {SCHEMA}")
            files = {path: Blob(*entry) for path, entry in found["files"].items()}
            facts = dict(found["facts"])
            if not all(is_digest(digest) and type(size) is int and size >= 0 for digest, size in files.values()):
                raise ValueError("a file is not [digest, bytes]")
            if (problem := paths_problem(files, ())) is not None:
                raise ValueError(f"a path cannot be made: {problem}")
            if not all(isinstance(text, str) for text in facts.values()):
                raise ValueError("a fact is not text")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ArtifactError(
                f"{source}: {RECIPES} is not an index of recipes ({error}); compile it again"
            ) from error
        return cls(files, facts)

    def to_bytes(self) -> bytes:
        return canonical_json(
            {"schema": SCHEMA, "facts": dict(self.facts), "files": {path: [*blob] for path, blob in self.files.items()}}
        )

    @property
    def contents(self) -> Contents:
        """As a packed third-party cache (artifacts/third_party), to be unpacked."""
        files = {path: PackedFile(blob, False) for path, blob in self.files.items()}
        return Contents(GaudiCache.name, self.facts, files, (), "", {}, {})


def pinned_slots(bundle: Bundle, capacity: int) -> int | None:
    """The number of sequences of `capacity` tokens that the bundle pins its KV cache to; None if not pinned."""
    blocks = bundle.option(KV_BLOCKS, 0)
    return max(1, blocks * bundle.plan.limits.block_size // capacity) if blocks else None


def put_recipes(bundle: Bundle, mode: str) -> Path | None:
    """Copy a bundle's recipes to where the bridge will look, before it is imported, and set its variable.

    The folder is PT_HPU_RECIPE_CACHE_CONFIG's, otherwise one of this user. Files are copied because the bridge writes
    to them; those with other content, including torn ones, are replaced. Returns None for a bundle without recipes and,
    with a warning, if they are for another `mode`. Raises ArtifactError for damaged recipes, InputError if the variable
    requests deleting the folder, DeviceError without a local disk, CapacityError or UnwritableError.
    """
    if RECIPES not in bundle.manifest.files:
        return None
    built_for = bundle.manifest.options.get(BUILT_FOR, {}).get("mode", mode)
    if built_for != mode:
        _log.warning(
            "%s: its recipes are for the mode %s and do not work in %s: graphs are compiled at this start", bundle.path,
            built_for, mode,
        )  # fmt: skip
        return None
    bundle.files.require_native(RECIPES)
    recipes = Recipes.parse(bundle.files.read(RECIPES), str(bundle.path))
    folder = _chosen(bundle, digest_bytes(recipes.to_bytes())[7:23])
    unpack(_Blobs(bundle.files), GaudiCache(), recipes.contents, folder, differing="replace")
    set_variable(folder, recipes.contents.size)
    return folder


def _chosen(bundle: Bundle, name: str) -> Path:
    requested = GaudiCache().location(variables((VARIABLE,)))
    if requested is not None:
        folder = Path(requested)
        if not is_local(_existing(folder)):
            _log.warning(
                "%s is not known to be on a local disk: the Gaudi software locks files in it, which network file "
                "systems may not do; set %s to a folder on a local one", folder, VARIABLE,
            )  # fmt: skip
        return folder
    return local_folder(bundle.settings, name)


def local_folder(settings: Settings, name: str) -> Path:
    """The path of a folder on a local disk that only this user writes to, not yet created. Raises DeviceError."""
    refused = []
    for parent in _own_parents(settings):
        if is_local(_existing(parent)):
            make_folder(parent)
            if is_own(parent.stat()):
                return parent / name
            refused.append(f"{parent} can be written by others")
        else:
            refused.append(f"{parent} is not known to be on a local disk")
    raise DeviceError(
        f"no place for Gaudi's recipes: {'; '.join(refused)}; set TMPDIR to a folder on a local disk, or, where a "
        f"bundle is opened, {VARIABLE}=FOLDER,false,{LEAST_MIB}"
    )


def _own_parents(settings: Settings) -> Iterator[Path]:
    yield settings.user_cache_dir / "recipes"
    user = os.geteuid() if hasattr(os, "geteuid") else "user"
    yield Path(tempfile.gettempdir()) / f"llmc-recipes-{user}"


def set_variable(folder: Path, size: int) -> None:
    """Make the bridge use `folder`, with room for `size` more bytes. The bridge reads the variable once."""
    config = f"{folder}/,false,{max(LEAST_MIB, 2 * size >> 20)}"
    before = variables((VARIABLE,)).get(VARIABLE, "")
    if BRIDGE in sys.modules and before.partition(",")[0].rstrip("/") != str(folder):
        _log.warning(
            "%s was imported before the bundle's recipes were in place, so it may compile graphs again; set "
            "%s=%s before the start", BRIDGE, VARIABLE, config,
        )  # fmt: skip
    os.environ[VARIABLE] = config


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


class _Blobs:
    def __init__(self, files: BundleFiles) -> None:
        self._files = files

    def path(self, blob: Blob, /) -> Path:
        found = self._files.path(blob.digest)
        if self._files.manifest.blobs[blob.digest] != blob.size:
            raise ArtifactError(f"{self._files.folder}: {RECIPES} is wrong about the size of {blob.digest}")
        return found
