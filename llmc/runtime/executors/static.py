"""The base of executors whose executables each have one shape and open on first use."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from llmc.runtime.executors.base import Executor

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest_schema import Executable
    from llmc.runtime.step import Step


class StaticExecutor(Executor):
    """An executor with an executable for each shape of step."""

    @property
    def exact(self) -> bool:
        """No: every executable has one shape."""
        return False

    def executable_of(self, step: Step) -> str:
        """Name of the executable in the manifest."""
        return str(self._executable(step))

    def warm(self, steps: list[tuple[str, int, int, int]]) -> None:
        """Open the named executables; the others open when first needed."""
        for shape in steps:
            self._open(self.bundle.executable(*shape))

    def open_all(self) -> None:
        """Open every executable, one after the other."""
        for executable in self.bundle.manifest.executables:
            self._open(executable)

    def _executable(self, step: Step) -> Executable:
        """The manifest's executable for a step; raises ArtifactError when the bundle has none."""
        return self.bundle.executable(step.phase, step.batch, step.query, step.context)

    @abstractmethod
    def _open(self, executable: Executable) -> Any:
        """What runs an executable, opened if need be."""
