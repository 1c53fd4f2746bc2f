"""The contract of finishing: on its own host, a device's compiler makes native executables of a bundle's portable ones.

A target whose compiles end portable has a `Finisher` (`Target.finisher`), which is one of two:

- `EachExecutable` makes one executable of another: a vendor's compiler that is called for each;
- `WholeBundle` runs every bucket once, while the device writes a cache of its own: that cache becomes files of the
  bundle, and its programs stay as they are.

pipeline/finish.py does the rest for both. Each result is an entry of the store, whose key names all that it depends on:
the digest of the portable executable (or bundle), the files in `reads`, what `host` says, `pins`, and the finisher's
code. What is finished is run against the portable executables before it is published. The finished manifest has the
executor `executor`, `pins` among its options, and what it is tied to as the option "finished_for".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from llmc.runtime.executors import executor_class

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest_schema import Executable
    from llmc.artifacts.key import Value
    from llmc.buckets.plan import Plan
    from llmc.runtime.bundle import Bundle

Reported: TypeAlias = "Callable[[Executable], None]"
"""Hears of each executable that is done."""


class Finisher(ABC):
    """What both ways have in common."""

    executor: ClassVar[str]
    """Name of the executor that replays what is finished. Its `host` says what that is tied to."""

    @abstractmethod
    def lacks(self) -> str:
        """What this host lacks to finish, in words, with the line that installs it or where to go; "" if nothing."""

    def host(self) -> Mapping[str, str]:
        """What finished executables are tied to: card, driver, compiler … of this host. Not empty where nothing
        lacks."""
        return executor_class(self.executor).description.host()

    def pins(self, bundle: Bundle) -> Mapping[str, Value]:
        """What finishing decides for good, by name: options of the finished manifest and components of the keys."""
        return {}

    def host_files(self, folder: Path, bundle: Path, plan: Plan) -> Mapping[str, str]:
        """Texts for the device's own host, by file name: what servers there read, and a job that finishes `bundle`.
        They will be written to `folder`. None for most devices."""
        return {}


class EachExecutable(Finisher):
    """One executable of another."""

    reads: ClassVar[tuple[str, ...]] = ()
    """Files of the bundle that `finish` reads beside the executable."""

    programs: ClassVar[tuple[str, ...]] = ()
    """Files of the bundle that are programs, too, and are finished by `finish_program`."""

    @abstractmethod
    def finish(self, bundle: Bundle, executable: Executable) -> bytes:
        """The native executable of a portable one of `bundle`. Called in any thread, `--jobs` at once.

        Raises CompileError, with the compiler's own words or the path of its log, and DeviceError.
        """

    def finish_program(self, bundle: Bundle, name: str) -> bytes:
        """As `finish`, of one of `programs`; a finisher that names some has it."""
        raise NotImplementedError(name)


class WholeBundle(Finisher):
    """All executables at once, by running them."""

    @abstractmethod
    def finish(self, bundle: Bundle, pins: Mapping[str, Value], folder: Path, reported: Reported) -> Mapping[str, Path]:
        """Run every executable of the portable `bundle` on the device, and return the files that it left, by their
        names in the finished bundle; one that another names by its digest has that digest as its name. `folder` is
        empty, and removed afterwards.

        Raises CompileError and DeviceError.
        """
