"""The accelerator's state: memory, graphs compiled, and faults to inject. One accelerator a process.

FAKE_HPUS      how many accelerators there are; default 1
FAKE_HPU_MEMORY     bytes of memory of the accelerator; default 1 GiB
FAKE_HPU_DRIVER     version of the driver; the fake SDK wants the same major.minor as its own
FAKE_HPU_TORCH      the torch that the fake SDK was built for; default: the one that runs
FAKE_HPU_OLD        1: a release without PT_COMPILE_ONLY_MODE
"""

from __future__ import annotations

import hashlib
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

VERSION = "1.24.0"

listeners: list[Callable[[str, float, str], None]] = []
"""Called with a metric's name, seconds and what it was about, as the bridge's event dispatcher does."""


class Accelerator:
    def __init__(self) -> None:
        self.total = int(os.environ.get("FAKE_HPU_MEMORY", str(1 << 30)))
        self.in_use = 0
        self.storages: dict[int, list[int]] = {}
        self.recipes: set[str] = set()
        self.pending: list[str] = []
        self.unwritten: dict[str, str] = {}
        self.capturing: list[Any] | None = None
        self.inside_graph = 0
        self.compile_only = False
        self.fail_after: int | None = None

    # memory

    def hold(self, owner: Any, storage: Any) -> None:
        """Count a storage as long as any tensor is on it."""
        size, key = storage.nbytes(), storage._cdata
        if key not in self.storages:
            if self.in_use + size > self.total or self._fails(size):
                raise RuntimeError(
                    f"[Rank:0] FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::{size} ({size >> 20})MB"
                )
            self.storages[key] = [0, size]
            self.in_use += size
        self.storages[key][0] += 1
        weakref.finalize(owner, self.drop, key)

    def drop(self, key: int) -> None:
        held = self.storages[key]
        held[0] -= 1
        if not held[0]:
            self.in_use -= held[1]
            del self.storages[key]

    def _fails(self, size: int) -> bool:
        """Whether an injected fault says that the memory is full: after `fail_after` more allocations."""
        if self.fail_after is None or not size:
            return False
        self.fail_after -= 1
        return self.fail_after < 0

    # graphs

    def compile(self, text: str) -> None:
        """Compile a graph, unless this process or the recipe cache on disk has it."""
        digest = _cache_id(text)
        if digest in self.recipes:
            return
        self.recipes.add(digest)
        folder = recipe_folder()
        if folder is not None and _usable(folder / f"{digest}.recipe"):
            return  # read from disk: nothing is compiled
        for tell in list(listeners):
            tell("graph_compilation", 0.01, text)
        if folder is not None:
            self.unwritten[digest] = f"recipe {VERSION} {len(text)}\n"

    def operator(self, text: str) -> None:
        """An operator ran outside a compiled graph."""
        from habana_frameworks.torch.utils.internal import is_lazy

        if self.inside_graph or self.capturing is not None:
            return
        if is_lazy():
            self.pending.append(text)
        else:
            self.compile(text)

    def mark_step(self) -> None:
        """Compile what lazy mode has gathered."""
        if self.pending:
            text = "\n".join(self.pending)
            self.pending.clear()
            self.compile(text)

    def flush(self) -> None:
        """Write recipes to the cache folder; the real one does so in the background."""
        folder = recipe_folder()
        for digest, text in self.unwritten.items():
            assert folder is not None
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{digest}.recipe").write_text(text)
            (folder / f"{digest}.metadata").write_text(f"{time.time_ns()}\n")
        self.unwritten.clear()


def _cache_id(text: str) -> str:
    """<hash of the graph>_<hash of the libraries>_syn<driver>, as backend/kernel/hpu_recipe_cache.cpp has it."""
    graph, libraries = (hashlib.sha256(part.encode()).digest() for part in (text, VERSION))
    driver = os.environ.get("FAKE_HPU_DRIVER", VERSION)
    return f"{int.from_bytes(graph[:8], 'little')}_{int.from_bytes(libraries[:8], 'little')}_syn{driver}"


def _usable(recipe: Path) -> bool:
    """Whether a recipe is there, whole, and of this version, with its metadata (recipe_cache.cpp, lookup); any other is
    compiled again, and only the bridge's own log says so."""
    metadata = recipe.with_suffix(".metadata")
    if not recipe.exists() or not metadata.exists() or not metadata.stat().st_size:
        return False
    text = recipe.read_text()
    return text.startswith(f"recipe {VERSION} ") and text.endswith("\n")


def recipe_folder() -> Path | None:
    """PT_HPU_RECIPE_CACHE_CONFIG=path,delete,size_mb: emptied once where `delete` says so."""
    path, _, rest = os.environ.get("PT_HPU_RECIPE_CACHE_CONFIG", "").partition(",")
    if not path:
        return None
    folder = Path(path)
    if folder not in _opened:
        _opened.add(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if rest.partition(",")[0].strip().lower() in ("true", "1"):
            for old in [*folder.glob("*.recipe"), *folder.glob("*.metadata")]:
                old.unlink()
    return folder


_opened: set[Path] = set()
_accelerator: Accelerator | None = None


def count() -> int:
    return int(os.environ.get("FAKE_HPUS", "1"))


def accelerator() -> Accelerator:
    """The acquired accelerator; raises RuntimeError as the bridge does where there is none, or another driver."""
    global _accelerator  # noqa: PLW0603
    if _accelerator is None:
        if not count():
            raise RuntimeError("synStatus=8 [Device not found] Device acquire failed.")
        driver = os.environ.get("FAKE_HPU_DRIVER", VERSION)
        if driver.split(".")[:2] != VERSION.split(".")[:2]:
            raise RuntimeError(
                f"synStatus=26 [Generic failure] Device acquire failed. (driver {driver}, SynapseAI {VERSION})"
            )
        _accelerator = Accelerator()
    return _accelerator


def reset() -> None:
    """A new, empty accelerator: for tests only."""
    global _accelerator  # noqa: PLW0603
    _accelerator = None
    _opened.clear()
