"""Cached stages: each is a key of named components and a build. A result in the store is not built again."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from llmc.artifacts.atomic_write import UnwritableError, writing
from llmc.artifacts.digest import digest_bytes, digest_file
from llmc.artifacts.key import LOCAL, Key, Value, canonical_json
from llmc.artifacts.log import logger
from llmc.artifacts.verified_files import settled, signature
from llmc.compiler.checkpoint.base import without_path
from llmc.compiler.model_size import weights_in
from llmc.errors import CapacityError, DeviceError
from llmc.platforms import how_to_install
from llmc.settings import Settings

if TYPE_CHECKING:
    from llmc.artifacts.digest import Blob
    from llmc.artifacts.store.entries import Entry
    from llmc.artifacts.store.store import Store
    from llmc.artifacts.store.workspace import Workspace
    from llmc.buckets.plan import Plan
    from llmc.compiler.checkpoint.base import Checkpoint

Build = Callable[["Workspace"], "Mapping[str, Blob]"]
OnStageReport = Callable[["StageReport"], None]
T = TypeVar("T")
MB = 10**6
LARGE = 500 * MB
"""File size in bytes from which on reading reports progress."""


@dataclass(frozen=True)
class StageReport:
    """A stage that ended, or with `seconds` None began; `index` of `total` stages of its name have ended."""

    name: str
    cached: bool
    seconds: float | None
    index: int = 1
    total: int = 1


@dataclass
class Stages:
    """The context of `trace` and `lower`: store, checkpoint, plan, and a way to run a cached stage."""

    store: Store
    checkpoint: Checkpoint
    plan: Plan
    report: OnStageReport
    settings: Settings = field(default_factory=Settings.from_environment)

    def run(self, kind: str, components: Mapping[str, Any], build: Build) -> Entry:
        """Return the stage's entry, built now if its key is new. `meta["seconds"]` keeps the build time for
        estimates."""
        self.report(StageReport(kind, False, None))
        start, parameters = time.perf_counter(), self.parameters

        def timed(workspace: Workspace) -> Mapping[str, Blob]:
            began = time.perf_counter()
            outputs = build(workspace)
            workspace.meta |= {"seconds": round(time.perf_counter() - began, 3), "parameters": parameters}
            return outputs

        entry, hit = self.store.get_or_build(Key(kind, components), timed)
        self.report(StageReport(kind, hit, time.perf_counter() - start))
        return entry

    def path(self, blob: Blob) -> Path:
        """A blob's verified file."""
        return self.store.path(blob)

    @cached_property
    def parameters(self) -> int:
        """Number of the model's weights, which selects comparable stage times; 0 if unknown."""
        return sum(weights.count for weights in weights_in(self.checkpoint))

    @property
    def config_digest(self) -> str:
        """Digest of the model's configuration, independent of the order of its members and its path."""
        return digest_bytes(canonical_json(without_path(self.checkpoint.config)))

    def checkpoint_digest(self) -> str:
        """Digest of the checkpoint's files, each hashed again only after it changed on disk."""
        return self.checkpoint.digest(self._hash_file)

    def reading(self, *, tokenizer: bool = False) -> dict[str, Value]:
        """Key components of checkpoint reads: its content, and the packages that decode it."""
        found: dict[str, Value] = {"checkpoint": self.checkpoint_digest()}
        if self.checkpoint.format.startswith("gguf"):
            found |= toolchain("tokenizers" if tokenizer else "gguf")
        return found

    def checkpoint_files(self) -> dict[str, str]:
        """Digest of each of the checkpoint's files, by role, hashed as for `checkpoint_digest`."""
        return {role: self._hash_file(path) for role, path in sorted(self.checkpoint.roles().items())}

    def _hash_file(self, path: Path) -> str:
        seen = signature(path.stat())
        if not settled(seen):  # it may change again without changing its times
            return self._digest(path, seen.size)
        identity = {**seen._asdict()}

        def build(workspace: Workspace) -> Mapping[str, Blob]:
            workspace.meta["digest"] = self._digest(path, seen.size)
            return {}

        entry, _ = self.store.get_or_build(Key(f"{LOCAL}file-digest", identity), build)
        return str(entry.meta["digest"])

    def _digest(self, path: Path, size: int) -> str:
        if size < LARGE:
            return digest_file(path)
        read = 0

        def on_progress(count: int) -> None:
            nonlocal read
            read += count
            self.report(StageReport("read", False, None, read // MB, size // MB))

        return digest_file(path, on_progress)

    @property
    def max_positions(self) -> int:
        """Positions that rotary tables must cover: the plan's longest cache, rounded up to a power of two."""
        longest = max(self.plan.limits.max_model_len, *(b.context + b.query for b in self.plan.buckets))
        return 1 << (longest - 1).bit_length()


@contextmanager
def filled_folder(store: Store, name: str, fill: Callable[[Path], T]) -> Iterator[T]:
    """Yield the result of `fill` in a temporary folder, which lives as long as the context.

    The folder is in the store, which allows links to the store's files. Where the store has no room or cannot be
    written, it is in the system's temporary folder. Raises CapacityError or UnwritableError where that has no room
    either.
    """
    temporaries = store.root / "v1" / "tmp"
    with ExitStack() as stack:

        def make(where: Path | None) -> T:
            return fill(Path(stack.enter_context(tempfile.TemporaryDirectory(dir=where, prefix=f"{name}-"))))

        try:
            built = make(temporaries if temporaries.is_dir() else None)
        except (OSError, CapacityError, UnwritableError) as error:
            elsewhere = Path(tempfile.gettempdir())
            logger().warning("%s are written to %s instead of the store: %s", name, elsewhere, error)
            with writing(elsewhere, 0, "set TMPDIR to a folder that has room"):
                built = make(None)
        yield built


def toolchain(*packages: str, python: bool = False) -> dict[str, Value]:
    """Key components "toolchain.<package>", and with `python` the version of Python, where it traces a model's code."""
    found: dict[str, Value] = {f"toolchain.{package}": version_of(package) for package in packages}
    return found | {"toolchain.python": "{}.{}".format(*sys.version_info)} if python else found


def version_of(package: str, extra: str = "compile") -> str:
    """Installed version, without importing; raises DeviceError with the install line when it is missing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        raise DeviceError(f"{package} is not installed; {how_to_install(package, extra)}") from None
