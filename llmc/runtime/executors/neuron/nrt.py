"""NEFFs on NeuronCores, through nrtpy. The only module that uses the Neuron runtime.

nrtpy (Neuron SDK documentation, "nrtpy" of 2026-07): NrtpyModel.load_from_neff(path, name, core_id, cc_enabled,
rank_id, world_size), called with inputs and outputs by name; NrtpyTensor.from_numpy(array, name, core_id) and numpy();
configure(visible_cores); NrtError with the status's name and number. Inputs are "input0" …, outputs "output0" …
(compiler/targets/neuron/on_target.py). An output that aliases an input gets that input's tensor. The kernel's instance
type determines the chip: "trn2.48xlarge".
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmc.artifacts.temporaries import temporary_folder
from llmc.errors import ArtifactError, DeviceError
from llmc.runtime.executors.neuron.files import NeuronFile, share, share_bytes
from llmc.runtime.executors.xla.arrays import DeviceArrays, WeightViews, dtype_of
from llmc.runtime.executors.xla.envelope import AXIS, Tensor

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
        """Bytes on all cores together."""
        return len(self.parts) * share_bytes(self.tensor, len(self.parts))


class NeuronArrays(DeviceArrays):
    """Arrays of the first `ranks` NeuronCores that the process sees."""

    def __init__(self, bundle: Bundle, ranks: int) -> None:
        import nrtpy

        if ranks > 1:
            with suppress(nrtpy.NrtpyError):  # the runtime already runs in this process, with its cores
                nrtpy.configure(visible_cores=list(range(ranks)))
        self._nrtpy = nrtpy
        self._ranks = ranks
        self._source = str(bundle.path)
        self._views = WeightViews(bundle)
        self._weights: dict[str, DeviceArray] = {}

    def zeros(self, tensor: Tensor) -> DeviceArray:
        part = np.zeros(share(tensor, self._ranks), dtype_of(tensor.dtype))
        return self._placed(tensor, [part] * self._ranks)

    def weight(self, tensor: Tensor) -> DeviceArray:
        if tensor.name not in self._weights:
            self._weights[tensor.name] = self._placed(tensor, self._parts(tensor, self._views.array(tensor)))
        return self._weights[tensor.name]

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

    @property
    def weight_bytes(self) -> int:
        return self._views.nbytes

    def close(self) -> None:
        self._weights.clear()

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
