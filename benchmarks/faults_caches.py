"""Three persistent caches behind one pair of verbs, for the comparison in faults.py.

Each `put` and `get` is what the library's own code does with its cache around a compile: for jax that is
`put_executable_and_time` and `get_executable_and_time` of jax._src.compilation_cache without the executable, whose
bytes are the payload (combine, compress, LRUCache); an exception of `get` is a miss with a warning in jax's compiler,
and is counted as raised here.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Protocol


class Cache(Protocol):
    """A cache opened by this process."""

    def put(self, name: int, payload: bytes) -> bool:
        """Whether it was kept: True unless the cache said, without raising, that it was not."""
        ...

    def get(self, name: int) -> bytes | None: ...

    def close(self) -> None: ...


class Llmc:
    """Store.get_or_build and Store.lookup with every digest verified."""

    def __init__(self, root: Path) -> None:
        import logging

        from llmc.artifacts.key import Key
        from llmc.artifacts.store.store import Store

        self._store = Store(root)
        self._said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: self._said.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("llmc.artifacts").addHandler(handler)
        self._key = lambda name: Key("benchmark", {"name": name})

    def put(self, name: int, payload: bytes) -> bool:
        self._store.get_or_build(self._key(name), lambda space: {"graph": space.put_bytes(payload)})
        return not any("not cached" in message for message in self._said)

    def get(self, name: int) -> bytes | None:
        from llmc.artifacts.store.blobs import BlobMissingError

        entry = self._store.lookup(self._key(name), verify=True)
        try:
            return None if entry is None else self._store.get_bytes(entry.outputs["graph"].digest)
        except BlobMissingError:  # documented: a miss
            return None

    def close(self) -> None:
        """Nothing is held back."""


class Jax:
    """The persistent compilation cache, without limit on its size, as it is by default."""

    def __init__(self, root: Path) -> None:
        from jax._src import compilation_cache, lru_cache

        self._cache = lru_cache.LRUCache(str(root), max_size=-1)
        self._layer = compilation_cache

    def put(self, name: int, payload: bytes) -> bool:
        data = self._layer.combine_executable_and_time(payload, 1)
        self._cache.put(f"jit_f-{name:064x}", self._layer.compress_executable(data))
        return True

    def get(self, name: int) -> bytes | None:
        data = self._cache.get(f"jit_f-{name:064x}")
        if data is None:
            return None
        return self._layer.extract_executable_and_time(self._layer.decompress_executable(data))[0]

    def close(self) -> None:
        """Nothing is held back."""


class DiskCache:
    """diskcache.Cache with its default settings; payloads are bytes."""

    def __init__(self, root: Path) -> None:
        import diskcache

        self._cache = diskcache.Cache(str(root))

    def put(self, name: int, payload: bytes) -> bool:
        return bool(self._cache.set(name, payload))

    def get(self, name: int) -> bytes | None:
        found: bytes | None = self._cache.get(name)
        return found

    def close(self) -> None:
        """Moves what is in the log of the database into it."""
        self._cache.close()


def left_by_llmc(root: Path) -> int:
    """Temporaries that a sweep leaves a minute after their makers died."""
    from llmc.artifacts.store.audit import DEAD_SECONDS, Remover, sweep
    from llmc.artifacts.store.store import Store

    layout = Store(root).layout
    sweep(layout, Remover(), time.time() + DEAD_SECONDS + 1)
    return sum(1 for path in layout.temporaries.rglob("*") if path.is_file())


def left_by_jax(root: Path) -> int:
    """Files that no `get` can read: there is no sweep, and `put` leaves what is there."""
    from jax._src import compilation_cache

    left = 0
    for path in root.glob("*"):
        try:
            compilation_cache.decompress_executable(path.read_bytes())
        except Exception:  # noqa: BLE001 - whatever zlib or zstandard raise
            left += 1
    return left


def left_by_diskcache(root: Path) -> int:
    """Files unknown to the database after `Cache.check(fix=True)`."""
    import diskcache

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            cache = diskcache.Cache(str(root))
            cache.check(fix=True)
            unknown = [item for item in cache.check() if issubclass(item.category, diskcache.UnknownFileWarning)]
        except Exception:  # noqa: BLE001 - a database that cannot be opened has nothing swept
            return sum(1 for path in root.rglob("*.val"))
    return len(unknown)


CACHES: dict[str, tuple[Callable[[Path], Cache], Callable[[Path], int]]] = {
    "llmc": (Llmc, left_by_llmc),
    "jax": (Jax, left_by_jax),
    "diskcache": (DiskCache, left_by_diskcache),
}


def load(name: str) -> str:
    """Import all that the cache needs, before any fork; returns the library's version."""
    if name == "llmc":
        import ctypes
        import logging
        import shutil
        import tempfile

        import filelock

        import llmc
        import llmc.artifacts.store.store

        logging.getLogger("llmc.artifacts").propagate = False
        del ctypes, shutil, tempfile, filelock
        return str(llmc.__version__)
    if name == "jax":
        import jax
        from jax._src import compilation_cache, lru_cache

        codec = "zstd" if compilation_cache.zstd or compilation_cache.zstandard else "zlib"
        del lru_cache
        return f"{jax.__version__}, {codec}"
    import diskcache

    return str(diskcache.__version__)
