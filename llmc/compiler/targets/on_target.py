"""The contract of on-target compilation: a device's host turns a bundle's portable executables into native ones.

A target whose compiles end portable has a `OnTargetCompiler` (`Target.on_target`) of one of two kinds:

- `EachExecutable` calls a vendor's compiler once per executable;
- `WholeBundle` runs every bucket once while the device writes a cache of its own. That cache becomes bundle files, and
  the programs stay unchanged.

pipeline/on_target.py does the rest for both. Each result is a store entry whose key names the digest of the portable
executable (or bundle), the files in `reads`, `host`, `pins` and the compiler's code. Results are checked against the
portable executables before they are published. The new manifest has the executor `executor`, `pins` among its
options, and `host` as the option "built_for".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from llmc.runtime.executors import executor_class

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest import Executable
    from llmc.artifacts.key import Value
    from llmc.buckets.plan import Plan
    from llmc.runtime.bundle import Bundle

OnExecutable: TypeAlias = "Callable[[Executable], None]"
"""Called with each compiled executable."""


class OnTargetCompiler(ABC):
    """The common part of both kinds."""

    executor: ClassVar[str]
    """Name of the executor for the compiled result, whose `host` names what that is tied to."""

    @abstractmethod
    def lacks(self) -> str:
        """Describe what this host lacks, with the install line or where to go; "" if nothing."""

    def host(self) -> Mapping[str, str]:
        """Return what compiled executables are tied to: device, driver, compiler …"""
        return executor_class(self.executor).description.host()

    def pins(self, bundle: Bundle) -> Mapping[str, Value]:
        """Return the final choices by name, which become manifest options and key components."""
        return {}

    def host_files(self, bundle: Path, plan: Plan) -> Mapping[str, str]:
        """Return texts for the device's host by file name: server settings, and a job that compiles `bundle` there."""
        return {}


class EachExecutable(OnTargetCompiler):
    """Compiles executables one by one."""

    reads: ClassVar[tuple[str, ...]] = ()
    """Bundle files that `compile` reads in addition to the executable."""

    programs: ClassVar[tuple[str, ...]] = ()
    """Bundle files that are programs as well, compiled by `compile_program`."""

    @abstractmethod
    def compile(self, bundle: Bundle, executable: Executable) -> bytes:
        """Compile a portable executable of `bundle`, in any thread. Raises CompileError with the compiler's words or
        log.
        """

    def compile_program(self, bundle: Bundle, name: str) -> bytes:
        """Compile one of `programs`; required of a class that names some."""
        raise NotImplementedError(name)


class WholeBundle(OnTargetCompiler):
    """Compiles all executables at once, by running them."""

    @abstractmethod
    def compile(
        self, bundle: Bundle, pins: Mapping[str, Value], folder: Path, reported: OnExecutable
    ) -> Mapping[str, Path]:
        """Run every executable of the portable `bundle` on the device, and return the files it left, by bundle name.

        A file that another refers to by digest is named by its digest. `folder` is empty, and removed afterwards.
        Raises CompileError and DeviceError.
        """
