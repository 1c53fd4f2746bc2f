"""Neuron's programs: NEFFs on NeuronCores, or HLO modules on the CPU of a host without any.

Cache, slots and steps are those of XLA's programs (xla/slot_executor.py). NEFFs run through nrtpy (Neuron SDK
documentation, "nrtpy" of 2026-07): NrtpyModel.load_from_neff(path, name, core_id, cc_enabled, rank_id, world_size),
called with inputs and outputs by name; NrtpyTensor.from_numpy(array, name, core_id) and numpy();
configure(visible_cores); NrtError with the status's name and number. Inputs are "input0" …, outputs "output0" …
(compiler/targets/neuron/on_target.py). An output that aliases an input gets that input's tensor. The kernel's instance
type determines the chip: "trn2.48xlarge".
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from llmc.artifacts.bundle.manifest import BUILT_FOR
from llmc.artifacts.temporaries import temporary_folder
from llmc.errors import ArtifactError, DeviceError
from llmc.runtime.executors.base import EXECUTABLES, ExecutorDescription
from llmc.runtime.executors.neuron.files import NeuronFile, share, share_bytes
from llmc.runtime.executors.xla.client import jax_version, open_client
from llmc.runtime.executors.xla.envelope import AXIS, Tensor
from llmc.runtime.executors.xla.programs import joined, mesh_of, sharding_of
from llmc.runtime.executors.xla.slot_executor import (
    SLOT_PROGRAMS,
    DeviceArrays,
    JaxArrays,
    SlotExecutor,
    SlotProgram,
    dtype_of,
)
from llmc.settings import Settings

if TYPE_CHECKING:
    from llmc.runtime.bundle import Bundle

INSTANCE = Path("/sys/devices/virtual/dmi/id/product_name")
DEVICE = Path("/dev/neuron0")
CHIPS = ("trn1", "inf2", "trn2")
_NO_ROOM = "NRT_RESOURCE"
_WRONG = ("NRT_INVALID", "NRT_UNSUPPORTED", "Mismatch detected between Runtime configuration and NEFF")


def chip_here() -> str:
    """The chip of this host if it has NeuronCores and nrtpy, otherwise ""."""
    if find_spec("nrtpy") is None or not DEVICE.exists():
        return ""
    try:
        instance = INSTANCE.read_text().strip()
    except OSError:
        return ""
    return next((chip for chip in CHIPS if instance.startswith(chip)), "")


@dataclass(frozen=True)
class DeviceArray:
    """An array in NeuronCore memory: each rank's part."""

    tensor: Tensor
    parts: tuple[Any, ...]

    @property
    def nbytes(self) -> int:
        return len(self.parts) * share_bytes(self.tensor, len(self.parts))


class NeuronArrays(DeviceArrays):
    """Arrays of the first `ranks` NeuronCores that the process sees."""

    def __init__(self, bundle: Bundle, ranks: int) -> None:
        import nrtpy

        super().__init__(bundle)
        if ranks > 1:
            with suppress(nrtpy.NrtpyError):  # the runtime already runs in this process, with its cores
                nrtpy.configure(visible_cores=list(range(ranks)))
        self._nrtpy = nrtpy
        self._ranks = ranks
        self._source = str(bundle.path)

    def zeros(self, tensor: Tensor) -> DeviceArray:
        part = np.zeros(share(tensor, self._ranks), dtype_of(tensor.dtype))
        return self._placed(tensor, [part] * self._ranks)

    def _put_weight(self, tensor: Tensor, array: NDArray[Any]) -> DeviceArray:
        return self._placed(tensor, self._parts(tensor, array))

    def put(self, *arrays: Any) -> list[DeviceArray]:
        tensors = [Tensor("input", np.shape(a), str(np.asarray(a).dtype), (None,) * np.ndim(a)) for a in arrays]
        return self.put_as(tensors, *arrays)

    def put_as(self, tensors: Sequence[Tensor], *arrays: Any) -> list[DeviceArray]:
        return [self._placed(t, self._parts(t, np.asarray(a))) for t, a in zip(tensors, arrays, strict=True)]

    def fetch(self, array: DeviceArray) -> NDArray[Any]:
        axis = next((i for i, dim in enumerate(array.tensor.dims) if dim == AXIS), None)
        if axis is None:
            return np.asarray(array.parts[0].numpy())
        return np.concatenate([part.numpy() for part in array.parts], axis)

    def _parts(self, tensor: Tensor, array: NDArray[Any]) -> list[NDArray[Any]]:
        axis = next((i for i, dim in enumerate(tensor.dims) if dim == AXIS), None)
        return [array] * self._ranks if axis is None else np.split(array, self._ranks, axis)

    def _placed(self, tensor: Tensor, parts: Sequence[NDArray[Any]]) -> DeviceArray:
        try:
            placed = [
                self._nrtpy.NrtpyTensor.from_numpy(np.ascontiguousarray(part), name=tensor.name, core_id=rank)
                for rank, part in enumerate(parts)
            ]
        except RuntimeError as e:
            raise DeviceError(
                f"{self._source}: the NeuronCores have no room for {tensor.name} {list(tensor.shape)} ({e}); serve "
                "fewer or shorter sequences, or compile with more --tensor-parallel"
            ) from e
        return DeviceArray(tensor, tuple(placed))


class NeffProgram:
    """A NEFF loaded on every rank's NeuronCore, ready to run."""

    native = True

    def __init__(self, file: NeuronFile, arrays: NeuronArrays, source: str) -> None:
        """Raises ArtifactError for a NEFF that the runtime rejects, DeviceError if the cores have no room."""
        self.header = file.header
        ranks = file.header.devices
        self._models = [_load(file, rank, source) for rank in range(ranks)]
        names = [f"input{i}" for i in range(len(self.header.inputs))]
        for model in self._models:
            if set(model.input_tensors_info) != set(names):
                raise ArtifactError(
                    f"{source}: its NEFF takes other inputs ({', '.join(sorted(model.input_tensors_info)[:3])} …) than "
                    "its module; compile it again"
                )
        self._inputs = names
        self._donated = dict(self.header.donated)
        self._outputs = [None if i in self._donated else arrays.zeros(t) for i, t in enumerate(self.header.outputs)]
        self._threads = ThreadPoolExecutor(ranks, thread_name_prefix="llmc-rank") if ranks > 1 else None

    def run(self, arguments: Sequence[DeviceArray]) -> list[DeviceArray]:
        """Run the program. Outputs that do not alias an input are valid until the next run."""
        outputs = [arguments[self._donated[i]] if found is None else found for i, found in enumerate(self._outputs)]

        def one(rank: int) -> None:
            self._models[rank](
                inputs={name: a.parts[rank] for name, a in zip(self._inputs, arguments, strict=True)},
                outputs={f"output{i}": a.parts[rank] for i, a in enumerate(outputs)},
            )

        if self._threads is None:
            one(0)
        else:  # ranks wait for each other
            list(self._threads.map(one, range(len(self._models))))
        return outputs


def _load(file: NeuronFile, rank: int, source: str) -> Any:
    import nrtpy

    neff = file.neffs[rank if len(file.neffs) > 1 else 0]
    ranks = file.header.devices
    with temporary_folder("neff") as folder:
        path = Path(folder, "model.neff")
        path.write_bytes(neff)
        try:
            return nrtpy.NrtpyModel.load_from_neff(
                path, core_id=rank, cc_enabled=ranks > 1, rank_id=rank, world_size=ranks
            )
        except RuntimeError as e:
            if _NO_ROOM in str(e):
                raise DeviceError(
                    f"{source}: NeuronCore {rank} has no memory left for it ({e}); compile fewer buckets, fewer or "
                    "shorter sequences, or with more --tensor-parallel"
                ) from e
            if any(word in str(e) for word in _WRONG):
                raise ArtifactError(
                    f"{source}: the Neuron runtime refuses its NEFF ({e}), made by neuronx-cc "
                    f"{file.members.get('compiler')} for {file.members.get('target')} with --lnc "
                    f"{file.members.get('lnc')}; compile the bundle again here: llmc compile --resume -o BUNDLE"
                ) from e
            raise DeviceError(f"{source}: NeuronCore {rank} cannot load it: {e}") from e


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
        if not file.neffs or file.members.get("target") != chip_here():
            raise ArtifactError(
                f"{source}: its NEFF is for {file.members.get('target', 'no chip')}, this host has {chip_here()}; "
                f"compile it again here: llmc compile --resume -o {self.bundle.path}"
            )
        assert isinstance(self._arrays, NeuronArrays)
        self.compilations.loaded(name)
        return NeffProgram(file, self._arrays, source)


class HloProgram:
    """A module compiled for this CPU; ranks are replicas, one per CPU device, with the collectives of NeuronCores."""

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
        parts = self._run.execute_sharded(arguments).disassemble_into_single_device_arrays()
        return joined(self.header.outputs, self._shardings, parts)


def compiled(hlo: bytes, devices: Sequence[Any]) -> Any:
    """Compile a module to a PJRT executable, one replica per device."""
    from jax._src.compiler import get_compile_options
    from jaxlib import _jax

    order = np.array([device.id for device in devices], np.int32).reshape(-1, 1)
    options = get_compile_options(num_replicas=len(devices), num_partitions=1, device_assignment=order)
    listed = _jax.DeviceList(tuple(devices))
    return devices[0].client.compile_and_load(_jax.mlir.hlo_to_stablehlo(hlo), listed, options)
