"""Neuron's programs: on NeuronCores from their NEFFs, on a host without any from their modules on its CPU.

Cache, slots and steps are those of XLA's programs (xla/slot_executor.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from llmc.errors import ArtifactError
from llmc.runtime.executors.base import EXECUTABLES, Content
from llmc.runtime.executors.neuron.files import NeuronFile
from llmc.runtime.executors.xla.client import jax_version, open_client
from llmc.runtime.executors.xla.slot_executor import SLOT_PROGRAMS, SlotExecutor, SlotProgram

if TYPE_CHECKING:
    from llmc.runtime.bundle import Bundle


class NeuronExecutor(SlotExecutor):
    """See the module's docstring. `threads` counts where JAX has not computed in this process yet."""

    name: ClassVar[str] = "neuron"
    opens: ClassVar[Mapping[str, Content]] = {
        "weights": "data", "weights.json": "data", EXECUTABLES: "by first bytes",
        **dict.fromkeys(SLOT_PROGRAMS, "by first bytes"),
    }  # fmt: skip

    @classmethod
    def check(cls, bundle: Bundle) -> None:
        """Refuse a host without JAX."""
        jax_version()

    def __init__(self, bundle: Bundle, slots: int, capacity: int, threads: int) -> None:
        super().__init__(bundle, slots, capacity, threads)
        from llmc.runtime.executors.xla.arrays import JaxArrays

        self._devices = open_client("cpu", bundle.option("tensor_parallel", 1), threads)
        self._begin(JaxArrays(bundle, self._devices))

    @property
    def in_place_of(self) -> str:
        """A NeuronCore."""
        return self.bundle.manifest.device

    def _load(self, file: str, name: str) -> SlotProgram:
        from llmc.runtime.executors.neuron.on_cpu import HloProgram

        if file in SLOT_PROGRAMS and file not in self.bundle.manifest.files:
            raise ArtifactError(f"{self.bundle.path}: no {file} in the bundle; compile it again")
        source = f"{self.bundle.path}: {name}"
        found = NeuronFile.parse(self.bundle.files.read(file), source)
        self.compilations.opened(name)
        return HloProgram(found, self._devices, source)
