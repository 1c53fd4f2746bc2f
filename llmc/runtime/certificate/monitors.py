"""All compilation monitors ("monitors") over one run: what they saw before it was ready, and what since.

Those of the whole process are here: files in compile caches, which also show what a driver compiles of PTX, and the
counters of torch.compile and JAX. An executor adds its own (runtime/executors/compilations.py).
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
"""Files of all caches that are remembered; with more the monitor is blind."""
_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "NEURON_COMPILE_CACHE_URL", "CUDA_CACHE_PATH", "HOME")
_COUNTERS = "torch._dynamo.utils"


@dataclass(frozen=True)
class Account:
    """What one monitor says: how many it saw before the run was ready and since, None where it is blind; their names;
    and why something may have happened unseen, "" where nothing did."""

    monitor: str
    before: int | None
    after: int | None
    names_before: tuple[str, ...] = ()
    names_after: tuple[str, ...] = ()
    blind: str = ""


class Watch:
    """Lets monitors look for as long as its `with` block lasts. `add` an executor's when it is open, in place of one
    of the same name; `ready` once everything is warm; then ask for `accounts`."""

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
        """Let these look, too."""
        for monitor in monitors:
            for other in [w for w in self._monitors if w.name == monitor.name]:
                self._monitors.remove(other)
                other.stop()
            monitor.start()
            self._monitors.append(monitor)

    def ready(self) -> None:
        """What is seen from now on counts."""
        for monitor in self._monitors:
            names = len(monitor.what())
            self._ready[monitor.name] = monitor.count(), names, monitor.blind()

    @property
    def blinded(self) -> list[str]:
        """Monitors that saw when it was ready, and do not any more, with the reason."""
        return [f"{w.name}: {why}" for w in self._monitors if not self._ready[w.name][2] and (why := w.blind())]

    def accounts(self) -> list[Account]:
        """What each says until now. Raises RuntimeError before `ready`."""
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
    """Those of the whole process, for a bundle of a device."""
    return [
        CacheFileMonitor(cache_locations(settings, device), unkept()), TorchMonitor(), LateJaxMonitor(),
    ]  # fmt: skip


class Stamp(NamedTuple):
    """What tells one content of a file from another: a new file has another inode, a changed one another time."""

    inode: int
    size: int
    modified_ns: int


class CacheFileMonitor(Monitor):
    """Sees each file that is made or changed in `folders`, by the names of the caches; they need not exist.

    `unseen`: why a toolchain here writes none of what it compiles; "" where none does that."""

    name = "files in compile caches"

    def __init__(self, folders: Mapping[str, Path], unseen: str = "") -> None:
        self.folders = dict(folders)
        self._files: dict[str, Stamp] = {}
        self._seen: list[str] = []
        self._unread = unseen

    def start(self) -> None:
        """Remember what is there."""
        self._files = self._read()

    def what(self) -> tuple[str, ...]:
        """The files, as cache: path within it."""
        now = self._read()
        self._seen += sorted(name for name, stamp in now.items() if self._files.get(name) != stamp)
        self._files = now
        return tuple(self._seen)

    def blind(self) -> str:
        """Where a cache cannot be read, holds too much, or is not kept."""
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
    """Files below a folder, by their paths within it; what vanishes meanwhile is passed over."""
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
    """The folders, by the cache's name; none lies in another. `device`: the store of whose compiles is among them.

    The rules of JAX, Triton, vLLM, its plug-in for Neuron, and Gaudi's recipes are those of llmc/integrations/. Others:
    torch 2.13, torch/_inductor/runtime/cache_dir_utils.py; awsdocs-neuron.readthedocs-hosted.com 2.29,
    neuron-caching; CUDA C++ programming guide 13, environment variables.
    """
    from llmc.artifacts.store.layout import Layout

    found: dict[str, str | Path | None] = {}
    for name in sorted({*CACHES.names()} - {gaudi.GaudiCache.name}):
        cache = compile_cache(name)
        found[name] = cache.location(variables(cache.variables))
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
    locations = {name: Path(folder) for name, folder in found.items() if folder}
    return {
        name: folder
        for name, folder in locations.items()
        if not any(location in folder.parents for location in locations.values())
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
    try:
        return re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    except (KeyError, ModuleNotFoundError, OSError):
        return f"uid_{os.getuid()}"


class TorchMonitor(Monitor):
    """What torch.compile counts of itself: graphs that TorchDynamo captured, and the work of Inductor and AOTAutograd.

    torch 2.13, torch/_dynamo/utils.py: `counters`, names and numbers by group. Whoever clears them makes this monitor
    blind. A process that did not import TorchDynamo compiled nothing with it.
    """

    name = "torch.compile counters"

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._seen: list[str] = []
        self._cleared = False

    def start(self) -> None:
        """Remember the counters."""
        self._last = _counters()

    def what(self) -> Sequence[str]:
        """The counters that grew, with how much."""
        now = _counters()
        if any(now.get(name, 0) < before for name, before in self._last.items()):
            self._cleared = True
        for name, value in now.items():
            if (grown := value - self._last.get(name, 0)) > 0:
                self._seen.append(f"{name} +{grown}")
        self._last = now
        return tuple(self._seen)

    def blind(self) -> str:
        """Once the counters were cleared."""
        return "somebody cleared the counters" if self._cleared else ""


def _counters() -> dict[str, int]:
    counters = getattr(sys.modules.get(_COUNTERS), "counters", {})
    return {f"{group}.{name}": value for group, of in list(counters.items()) for name, value in list(of.items())}


class LateJaxMonitor(Monitor):
    """Sees JAX's compilations if JAX is imported when it starts; if it is later, nobody heard what came first."""

    name = client.JaxMonitor.name

    def __init__(self) -> None:
        self._heard: client.JaxMonitor | None = None

    def start(self) -> None:
        """Listen, without importing JAX."""
        if "jax" in sys.modules:
            client.listen()
        if client.listens():
            self._heard = client.JaxMonitor()

    def what(self) -> Sequence[str]:
        """The programs."""
        return () if self._heard is None else self._heard.what()

    def blind(self) -> str:
        """Where JAX came in the middle."""
        return "JAX was imported in the middle" if self._heard is None and "jax" in sys.modules else ""
