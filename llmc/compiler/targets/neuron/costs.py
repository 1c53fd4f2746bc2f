"""Cost estimates of modules for NeuronCores."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from llmc.compiler.targets.costs import Timing, Verifying
from llmc.compiler.targets.xla.costs import XlaCosts
from llmc.compiler.targets.xla.target import TENSOR_PARALLEL

if TYPE_CHECKING:
    from llmc.compiler.options import CompileOptions


class NeuronCosts(XlaCosts):
    """Costs on cores of `chip`, each with `room` bytes under the options."""

    executable_seconds: ClassVar[float] = 1.5
    executable_bytes: ClassVar[int] = 400_000
    device_seconds: ClassVar[float] = 60.0
    verifying: ClassVar[Verifying] = Verifying(
        begin=Timing(fixed=1.0),
        opened=Timing(fixed=3.0),
        step=Timing(parameters=0.02),
        tokens=Timing(parameters=2.2),
    )

    def __init__(self, chip: str, room: Callable[[CompileOptions], int]) -> None:
        self._chip, self._room = chip, room

    def memory(self, options: CompileOptions) -> tuple[int, str] | None:
        cores = TENSOR_PARALLEL.of(options)
        return cores * self._room(options), f"of {cores} cores of {self._chip}"
