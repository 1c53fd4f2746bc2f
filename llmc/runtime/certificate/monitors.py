"""Compilation monitors over one run: what each saw before and after the bundle was ready.

This module has the process-wide monitors: files in compile caches, which include PTX compiled by a driver, and the
counters of torch.compile and JAX. Executors add their own (runtime/executors/compilations.py).
"""

from __future__ import annotations

import getpass
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from llmc.errors import DeviceError
from llmc.integrations import CACHES, compile_cache
from llmc.integrations.vllm_gaudi import cache as gaudi
from llmc.runtime.executors.compilations import Monitor
from llmc.runtime.executors.xla import client
from llmc.runtime.nvidia import gpus
from llmc.settings import variables

if TYPE_CHECKING:
    from llmc.settings import Settings

MOST_FILES = 200_000
"""Files to track over all caches; with more, the monitor is blind."""
_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "NEURON_COMPILE_CACHE_URL", "CUDA_CACHE_PATH", "HOME")
_COUNTERS = "torch._dynamo.utils"


@dataclass(frozen=True)
class Account:
    """The report of one monitor: counts before and after the run was ready, and their names.

    A count is None if the monitor was blind. `blind` says why it may have missed something, "" if it did not.
    """

    monitor: str
    before: int | None
    after: int | None
    names_before: tuple[str, ...] = ()
    names_after: tuple[str, ...] = ()
    blind: str = ""


class Watch:
    """Run monitors during a `with` block.

    Call `add` with an executor's monitors once it is open; one with the same name replaces the earlier one. Call
    `ready` once everything is warm, then read `accounts`.
    """

    def __init__(self, monitors: Sequence[Monitor]) -> None:
        self._monitors: list[Monitor] = []
        self._ready: dict[str, tuple[int | None, int, str]] = {}
        self._first = list(monitors)

    def __enter__(self) -> Watch:
        self.add(self._first)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        while self._monitors:
            self._monitors.pop().stop()

    def add(self, monitors: Sequence[Monitor]) -> None:
        """Start these monitors as well."""
        for monitor in monitors:
            for other in [w for w in self._monitors if w.name == monitor.name]:
                self._monitors.remove(other)
                other.stop()
            monitor.start()
            self._monitors.append(monitor)

    def ready(self) -> None:
        """Count everything seen from now on as `after`."""
        for monitor in self._monitors:
            names = len(monitor.what())
            self._ready[monitor.name] = monitor.count(), names, monitor.blind()

    @property
    def blinded(self) -> list[str]:
        """Monitors that worked when the run became ready and are blind now, with the reason."""
        return [f"{w.name}: {why}" for w in self._monitors if not self._ready[w.name][2] and (why := w.blind())]

    def accounts(self) -> list[Account]:
        """Return the report of each monitor. Raises RuntimeError before `ready`."""
        if not self._ready:
            raise RuntimeError("nothing is ready yet")
        return [self._account(monitor) for monitor in self._monitors]

    def _account(self, monitor: Monitor) -> Account:
        before, named, _ = self._ready[monitor.name]
        names = tuple(monitor.what())
        count, blind = monitor.count(), monitor.blind()
        after: int | None = (count or 0) - (before or 0)
        if not after and blind:
            after = None
        return Account(monitor.name, before, after, names[:named], names[named:], blind)


def process_monitors(settings: Settings, device: str) -> list[Monitor]:
    """Return the process-wide monitors for a bundle of `device`."""
    return [
        CacheFileMonitor(cache_locations(settings, device), unkept()), TorchMonitor(), LateJaxMonitor(),
    ]  # fmt: skip


class Stamp(NamedTuple):
    """Identifies one version of a file: a new file has another inode, a changed file another time."""

    inode: int
    size: int
    modified_ns: int


class CacheFileMonitor(Monitor):
    """Sees each file created or changed in `folders`, a mapping of cache name to path. The folders need not exist.

    `unseen`: why a toolchain here writes no file for what it compiles, "" if all of them do.
    """

    name = "files in compile caches"

    def __init__(self, folders: Mapping[str, Path], unseen: str = "") -> None:
        self.folders = dict(folders)
        self._files: dict[str, Stamp] = {}
        self._seen: list[str] = []
        self._unread = unseen

    def start(self) -> None:
        """Record the current files."""
        self._files = self._read()

    def what(self) -> tuple[str, ...]:
        """Return the changed files as "cache: path in it"."""
        now = self._read()
        self._seen += sorted(name for name, stamp in now.items() if self._files.get(name) != stamp)
        self._files = now
        return tuple(self._seen)

    def blind(self) -> str:
        """Return why a cache is unreadable, too large or not kept, or ""."""
        return self._unread

    def _read(self) -> dict[str, Stamp]:
        found: dict[str, Stamp] = {}
        for cache, folder in self.folders.items():
            try:
                for path, status in _files(folder):
                    found[f"{cache}: {path}"] = Stamp(status.st_ino, status.st_size, status.st_mtime_ns)
                    if len(found) > MOST_FILES:
                        self._unread = f"the caches hold more than {MOST_FILES} files"
                        return found
            except OSError as error:
                self._unread = f"the cache of {cache} cannot be read ({error.strerror})"
        return found


def _files(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the files below a folder with their relative paths; skips files that vanish meanwhile."""
    waiting = [""]
    while waiting:
        within = waiting.pop()
        try:
            with os.scandir(folder / within) as items:
                for item in items:
                    name = f"{within}/{item.name}" if within else item.name
                    try:
                        if item.is_dir(follow_symlinks=False):
                            waiting.append(name)
                        else:
                            yield name, item.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
        except (FileNotFoundError, NotADirectoryError):
            continue


def cache_locations(settings: Settings, device: str) -> dict[str, Path]:
    """Return the cache folders by cache name; no folder contains another.

    `device` selects the compile store to include. The rules of JAX, Triton, vLLM, vLLM's Neuron plug-in and Gaudi
    recipes are those of llmc/integrations/. Other sources: torch 2.13, torch/_inductor/runtime/cache_dir_utils.py;
    awsdocs-neuron.readthedocs-hosted.com 2.29, neuron-caching; CUDA C++ programming guide 13, environment variables.
    """
    from llmc.artifacts.store.layout import Layout

    found: dict[str, str | Path | None] = {}
    for name in sorted({*CACHES.names()} - {gaudi.GaudiCache.name}):
        cache = compile_cache(name)
        found[name] = cache.location(variables(cache.variables))
    for recipes in variables([gaudi.VARIABLE]).values():  # also where Gaudi deletes them at startup
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
    locations = {name: Path(folder) for name, folder in found.items() if folder}
    return {
        name: folder
        for name, folder in locations.items()
        if not any(location in folder.parents for location in locations.values())
    }


def unkept() -> str:
    """Return why compilations here may leave no file, "" if they all do or there is no GPU.

    The NVIDIA driver caches what it compiles from PTX unless CUDA_CACHE_DISABLE is 1 (CUDA C++ programming guide 13,
    environment variables).
    """
    if variables(["CUDA_CACHE_DISABLE"]).get("CUDA_CACHE_DISABLE") != "1":
        return ""
    try:
        has_gpus = bool(gpus())
    except DeviceError:
        has_gpus = True
    return "with CUDA_CACHE_DISABLE=1 the NVIDIA driver caches no compiled code in files" if has_gpus else ""


def _user() -> str:
    try:
        return re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    except (KeyError, ModuleNotFoundError, OSError):
        return f"uid_{os.getuid()}"


class TorchMonitor(Monitor):
    """Reads torch.compile's own counters: graphs captured by TorchDynamo, work of Inductor and AOTAutograd.

    torch 2.13, torch/_dynamo/utils.py: `counters`, names and numbers by group. Clearing them makes this monitor blind.
    A process that did not import TorchDynamo has compiled nothing with it.
    """

    name = "torch.compile counters"

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._seen: list[str] = []
        self._cleared = False

    def start(self) -> None:
        """Record the counters."""
        self._last = _counters()

    def what(self) -> Sequence[str]:
        """Return the counters that grew, with the increase."""
        now = _counters()
        if any(now.get(name, 0) < before for name, before in self._last.items()):
            self._cleared = True
        for name, value in now.items():
            if (grown := value - self._last.get(name, 0)) > 0:
                self._seen.append(f"{name} +{grown}")
        self._last = now
        return tuple(self._seen)

    def blind(self) -> str:
        """Return a reason if the counters were cleared, else ""."""
        return "somebody cleared the counters" if self._cleared else ""


def _counters() -> dict[str, int]:
    counters = getattr(sys.modules.get(_COUNTERS), "counters", {})
    return {f"{group}.{name}": value for group, of in list(counters.items()) for name, value in list(of.items())}


class LateJaxMonitor(Monitor):
    """Sees JAX compilations if JAX is imported before `start`; otherwise earlier ones may have been missed."""

    name = client.JaxMonitor.name

    def __init__(self) -> None:
        self._heard: client.JaxMonitor | None = None

    def start(self) -> None:
        """Listen to JAX without importing it."""
        if "jax" in sys.modules:
            client.listen()
        if client.listens():
            self._heard = client.JaxMonitor()

    def what(self) -> Sequence[str]:
        """Return the compiled programs."""
        return () if self._heard is None else self._heard.what()

    def blind(self) -> str:
        """Return a reason if JAX was imported after `start`, else ""."""
        return "JAX was imported in the middle" if self._heard is None and "jax" in sys.modules else ""
