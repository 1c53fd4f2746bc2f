"""The contract of an executor: compile each shape of a compile into one store entry."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from llmc.artifacts.digest import Blob, parse
from llmc.artifacts.key import Key
from llmc.compiler.code import code_digest
from llmc.compiler.stages import filled_folder
from llmc.compiler.targets import open_target
from llmc.compiler.targets.base import CompiledExecutable, Lowered, Shape, Target, shaping

if TYPE_CHECKING:
    from llmc.artifacts.store.entries import Entry
    from llmc.artifacts.store.store import Store
    from llmc.artifacts.store.workspace import Workspace
    from llmc.compiler.options import CompileOptions
    from llmc.settings import Settings


class BuiltExecutable(NamedTuple):
    """An executable's entry, whether it was cached, and its build time in seconds."""

    entry: Entry
    cached: bool
    seconds: float


Done = Callable[["Shape", BuiltExecutable], None]
"""Called for each finished executable, in the caller's thread."""


@dataclass(frozen=True)
class CompileWork:
    """Shared inputs of all executables of a compile; `settings` are the environment's."""

    store: Store
    target: Target
    lowered: Lowered
    options: CompileOptions
    settings: Settings

    def key(self, shape: Shape) -> Key:
        """Key of one executable, in named components."""
        return executable_key(self.target, self.lowered, shape, self.options)


class CompileExecutor(ABC):
    """Compiles executables, on one host or on a cluster."""

    @abstractmethod
    def compile(self, work: CompileWork, shapes: Sequence[Shape], done: Done) -> list[BuiltExecutable]:
        """Compile one executable per shape, in their order; those in the store are reused.

        After an error or an interrupt nothing keeps running, and finished executables are in the store. Raises
        CompileError, and DeviceError where no worker can compile them.
        """


def executable_key(target: Target, lowered: Lowered, shape: Shape, options: CompileOptions) -> Key:
    """Key of one executable, in named components."""
    return Key(
        "executable",
        {
            **{f"input.{k}": v for k, v in lowered.components.items()},
            **{f"toolchain.{k}": v for k, v in target.toolchain().items()},
            "isa": " ".join(target.isa()),
            "target": target.description.name,
            "state": target.state,
            "option.quantize": options.quantize,
            "option.dtype": options.dtype,
            **{f"option.{name}": value for name, value in shaping(target.description, options).items()},
            "shape.phase": shape.phase,
            "shape.batch": shape.batch,
            "shape.query": shape.query,
            "shape.context": shape.context,
            "code": code_digest(target.compile),
        },
    )


def compile_in_worker(device: str, lowered: Lowered, shape: Shape, options: CompileOptions) -> CompiledExecutable:
    """Compile one shape in a worker process."""
    return open_target(device).compile(lowered, shape, options)


def stored(workspace: Workspace, built: CompiledExecutable, seconds: float) -> Mapping[str, Blob]:
    """Store the outputs of an executable, with its compile time in seconds."""
    workspace.meta |= {"state": built.state, "seconds": round(seconds, 3)}
    return {"executable": workspace.put_bytes(built.data)}


def linked(store: Store, lowered: Lowered) -> AbstractContextManager[Path]:
    """Create a folder with the shared files under the names that executables refer to them by."""

    def link(folder: Path) -> Path:
        for digest in sorted(set(lowered.files.values())):  # several names may share a digest
            target = folder / parse(digest)
            try:
                target.hardlink_to(store.path(digest))
            except OSError:
                shutil.copyfile(store.path(digest), target)
        return folder

    return filled_folder(store, "files", link)
