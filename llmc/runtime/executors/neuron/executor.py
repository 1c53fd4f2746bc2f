"""Neuron's programs: on NeuronCores from their NEFFs, on a host without any from their modules on its CPU.

Cache, slots and steps are those of XLA's programs (xla/slot_executor.py).
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from llmc.artifacts.bundle.manifest_schema import FINISHED_FOR
from llmc.errors import ArtifactError
from llmc.runtime.executors.base import EXECUTABLES, Content
from llmc.runtime.executors.neuron.files import NeuronFile
from llmc.runtime.executors.neuron.nrt import chip_here
from llmc.runtime.executors.xla.client import jax_version, open_client
from llmc.runtime.executors.xla.slot_executor import SLOT_PROGRAMS, SlotExecutor, SlotProgram
from llmc.settings import Settings

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
    def host(cls) -> Mapping[str, str]:
        """The chip of this host. One that has none but is told of one, to compile for it, counts as that."""
        told = Settings.from_environment().neuron_target
        chip = chip_here() or (told if told is not None and shutil.which("neuronx-cc") is not None else "")
        return {"target": chip} if chip else {}

    @classmethod
    def check(cls, bundle: Bundle) -> None:
        """Refuse a host without JAX, unless it has NeuronCores."""
        if not chip_here():
            jax_version()

    def __init__(self, bundle: Bundle, slots: int, capacity: int, threads: int) -> None:
        super().__init__(bundle, slots, capacity, threads)
        ranks = bundle.option("tensor_parallel", 1)
        self._on_cores = FINISHED_FOR in bundle.manifest.options and bool(chip_here())
        if self._on_cores:
            from llmc.runtime.executors.neuron.nrt import NeuronArrays

            self._begin(NeuronArrays(bundle, ranks))
        else:
            from llmc.runtime.executors.xla.arrays import JaxArrays

            self._devices = open_client("cpu", ranks, threads)
            self._begin(JaxArrays(bundle, self._devices))

    @property
    def most_top_k(self) -> int | None:
        """As many as the graphs find, as vLLM's user guide for Neuron has it: "when top_k is -1, it is 256"."""
        return self.top_k or None

    @property
    def in_place_of(self) -> str:
        """NeuronCores, where there are none."""
        return "" if self._on_cores else self.bundle.manifest.device

    def _load(self, file: str, name: str) -> SlotProgram:
        if file in SLOT_PROGRAMS and file not in self.bundle.manifest.files:
            raise ArtifactError(f"{self.bundle.path}: no {file} in the bundle; compile it again")
        source = f"{self.bundle.path}: {name}"
        found = NeuronFile.parse(self.bundle.files.read(file), source)
        if found.neffs:
            self.bundle.files.require_native(name)
        if self._on_cores:
            return self._on_core(found, name, source)
        from llmc.runtime.executors.neuron.on_cpu import HloProgram

        self.compilations.opened(name)
        return HloProgram(found, self._devices, source)

    def _on_core(self, file: NeuronFile, name: str, source: str) -> SlotProgram:
        """A NEFF on this host's NeuronCores; raises ArtifactError for one of another chip, or none."""
        from llmc.runtime.executors.neuron.nrt import NeffProgram, NeuronArrays

        if not file.neffs or file.members.get("target") != chip_here():
            raise ArtifactError(
                f"{source}: its NEFF is for {file.members.get('target', 'no chip')}, this host has {chip_here()}; "
                f"finish it again here: llmc compile --resume -o {self.bundle.path}"
            )
        assert isinstance(self._arrays, NeuronArrays)
        self.compilations.loaded(name)
        return NeffProgram(file, self._arrays, source)
