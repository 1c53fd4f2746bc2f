"""Neuron's programs: NEFFs on NeuronCores, or HLO modules on the CPU of a host without any.

Cache, slots and steps are those of XLA's programs (xla/slot_executor.py).
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from llmc.artifacts.bundle.manifest import BUILT_FOR
from llmc.errors import ArtifactError
from llmc.runtime.executors.base import EXECUTABLES, ExecutorDescription
from llmc.runtime.executors.neuron.files import NeuronFile
from llmc.runtime.executors.neuron.nrt import NeffProgram, NeuronArrays, chip_here
from llmc.runtime.executors.xla.arrays import JaxArrays
from llmc.runtime.executors.xla.client import jax_version, open_client
from llmc.runtime.executors.xla.programs import mesh_of, sharding_of
from llmc.runtime.executors.xla.slot_executor import SLOT_PROGRAMS, SlotExecutor, SlotProgram
from llmc.settings import Settings

if TYPE_CHECKING:
    from llmc.runtime.bundle import Bundle


def host() -> Mapping[str, str]:
    """The chip of this host, or the configured one if it has none and compiles for it."""
    given = Settings.from_environment().neuron_target
    chip = chip_here() or (given if given is not None and shutil.which("neuronx-cc") is not None else "")
    return {"target": chip} if chip else {}


class NeuronExecutor(SlotExecutor):
    """Runs Neuron's programs. `threads` has an effect only before JAX's first computation in this process."""

    description: ClassVar[ExecutorDescription] = ExecutorDescription(
        {
            "weights": "data", "weights.json": "data", EXECUTABLES: "by first bytes",
            **dict.fromkeys(SLOT_PROGRAMS, "by first bytes"),
        }, host=host,
    )  # fmt: skip

    @classmethod
    def check(cls, bundle: Bundle) -> None:
        """Reject a host without JAX, unless it has NeuronCores."""
        if not chip_here():
            jax_version()

    def __init__(self, bundle: Bundle, slots: int, capacity: int, threads: int) -> None:
        super().__init__(bundle, slots, capacity, threads)
        ranks = bundle.option("tensor_parallel", 1)
        self._on_cores = BUILT_FOR in bundle.manifest.options and bool(chip_here())
        # as many as the graphs find, as vLLM's user guide for Neuron has it: "when top_k is -1, it is 256"
        self.capabilities = replace(
            self.capabilities, most_top_k=bundle.sample_top_k or None,
            in_place_of="" if self._on_cores else bundle.manifest.device,
        )  # fmt: skip
        if self._on_cores:
            self._begin(NeuronArrays(bundle, ranks))
        else:
            self._devices = open_client("cpu", ranks, threads)
            self._begin(JaxArrays(bundle, self._devices))

    def _load(self, file: str, name: str) -> SlotProgram:
        source = f"{self.bundle.path}: {name}"
        found = NeuronFile.parse(self.bundle.files.read(file), source)
        if found.neffs:
            self.bundle.files.require_native(name)
        if self._on_cores:
            return self._on_core(found, name, source)
        self.compilations.opened(name)
        return HloProgram(found, self._devices, source)

    def _on_core(self, file: NeuronFile, name: str, source: str) -> SlotProgram:
        """Load a NEFF on this host's NeuronCores; raises ArtifactError for another chip, or none."""
        if not file.neffs or file.members.get("target") != chip_here():
            raise ArtifactError(
                f"{source}: its NEFF is for {file.members.get('target', 'no chip')}, this host has {chip_here()}; "
                f"compile it again here: llmc compile --resume -o {self.bundle.path}"
            )
        assert isinstance(self._arrays, NeuronArrays)
        self.compilations.loaded(name)
        return NeffProgram(file, self._arrays, source)


class HloProgram:
    """A module compiled for this CPU, to prove a bundle's plan, padding and numbers without NeuronCores.

    Ranks are replicas of one module, one per CPU device; their collectives are those of NeuronCores.
    """

    native = False

    def __init__(self, file: NeuronFile, devices: Sequence[Any], source: str) -> None:
        """Raises ArtifactError for a module that XLA rejects."""
        self.header = file.header
        mesh = mesh_of(devices)
        self._shardings = [sharding_of(mesh, tensor) for tensor in self.header.outputs]
        try:
            self._run = compiled(file.hlo, devices)
        except Exception as e:
            raise ArtifactError(
                f"{source}: XLA cannot compile the module for this CPU ({e!s:.300}); compile the bundle again"
            ) from e

    def run(self, arguments: Sequence[Any]) -> list[Any]:
        from jax import make_array_from_single_device_arrays as joined

        parts = self._run.execute_sharded(arguments).disassemble_into_single_device_arrays()
        return [
            joined(tensor.shape, sharding, part)
            for tensor, sharding, part in zip(self.header.outputs, self._shardings, parts, strict=True)
        ]


def compiled(hlo: bytes, devices: Sequence[Any]) -> Any:
    """Compile a module to a PJRT executable, one replica per device."""
    from jax._src.compiler import get_compile_options
    from jaxlib import _jax

    order = np.array([device.id for device in devices], np.int32).reshape(-1, 1)
    options = get_compile_options(num_replicas=len(devices), num_partitions=1, device_assignment=order)
    listed = _jax.DeviceList(tuple(devices))
    return devices[0].client.compile_and_load(_jax.mlir.hlo_to_stablehlo(hlo), listed, options)
