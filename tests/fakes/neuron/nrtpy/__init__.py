"""A fake of nrtpy, the Neuron runtime's Python binding (Neuron SDK documentation, "nrtpy" of 2026-07).

NrtpyModel and NrtpyTensor have the names and parameters of that documentation; NEFFs are those of the fake compiler
(../neuronx_cc.py), replayed on XLA's CPU. It fails as the real one does, with the names and numbers of libnrt's
statuses (nrt_status.h): what is no NEFF or one of another chip is NRT_INVALID (2), no memory NRT_RESOURCE (4), and a
NEFF of another logical core is refused with the runtime's own sentence.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
import threading
from pathlib import Path
from typing import Any

import numpy as np

chip, cores = "trn2", 2
"""Of this host, and the NeuronCores of a logical one."""

memory = 1 << 40
"""Bytes that models and tensors may take together on a core."""

loaded: list[str] = []
"""Names of the models that were loaded."""

_used: dict[int, int] = {}
_groups: dict[str, _Group]


class NrtpyError(RuntimeError):
    """Of nrtpy itself."""


class NrtError(RuntimeError):
    """Of libnrt: a status with its number."""


class NrtpyTensor:
    """An array in a core's memory."""

    def __init__(self, array: np.ndarray[Any, Any], name: str | None, core_id: int) -> None:
        self.array, self.name, self.core_id = array, name, core_id
        self.shape, self.dtype = array.shape, array.dtype

    @classmethod
    def from_numpy(cls, array: np.ndarray[Any, Any], name: str | None = None, core_id: int = 0) -> NrtpyTensor:
        _take(core_id, array.nbytes)
        return cls(np.array(array), name, core_id)

    def __del__(self) -> None:
        _used[self.core_id] = _used.get(self.core_id, 0) - self.array.nbytes

    def write_from_numpy(self, array: np.ndarray[Any, Any]) -> None:
        if array.nbytes != self.array.nbytes:
            raise ValueError("the array's byte size does not match the tensor's")
        self.array[...] = array.reshape(self.shape)

    def numpy(self) -> np.ndarray[Any, Any]:
        return self.array.copy()


class NrtpyModel:
    """A NEFF on a core."""

    def __init__(self, text: str, core_id: int, rank_id: int, world_size: int) -> None:
        self._core, self._rank = core_id, rank_id
        self.input_tensors_info = dict.fromkeys(re.findall(r'neff_input_names="([^"]*)"', text))
        names = re.search(r'neff_output_names="([^"]*)"', text)
        self.output_tensors_info = dict.fromkeys(names[1].split(",") if names else [])
        aliases = text.partition("\n")[0]
        self._aliases = [(int(o), int(i)) for o, i in re.findall(r"\{(\d+)\}: \((\d+), \{\}, must-alias\)", aliases)]
        self._group = _groups.setdefault(text, _Group(text, world_size))

    @classmethod
    def load_from_neff(
        cls, neff_path: Path | str, name: str | None = None, core_id: int = 0, cc_enabled: bool = False,
        rank_id: int = 0, world_size: int = 1,
    ) -> NrtpyModel:  # fmt: skip
        data = Path(neff_path).read_bytes()
        try:
            version, header, size = (int.from_bytes(data[at : at + 8], "little") for at in (0, 8, 16))
            if (version, header) != (2, 1024) or size != len(data) - 1024:
                raise ValueError
            with tarfile.open(fileobj=io.BytesIO(data[1024:])) as archive:
                content = json.loads(archive.extractfile("neff.json").read())  # type: ignore[union-attr]
        except (ValueError, OSError, EOFError, KeyError, tarfile.TarError):
            raise NrtError("nrt_load failed: NRT_INVALID (2)") from None
        if content["target"] != chip:
            raise NrtError(f"nrt_load failed: NRT_INVALID (2): NEFF of {content['target']} on {chip}")
        if content["lnc"] != cores:
            raise NrtError("nrt_load failed: NRT_FAILURE (1): Mismatch detected between Runtime configuration and NEFF")
        if "replica_groups={{0,1" in content["module"] and not cc_enabled:
            raise NrtError("nrt_load failed: NRT_INVALID (2): collectives are not enabled")
        _take(core_id, len(data))
        loaded.append(name or Path(neff_path).stem)
        return cls(content["module"], core_id, rank_id, world_size)

    def __call__(
        self, inputs: dict[str, NrtpyTensor], outputs: dict[str, NrtpyTensor] | None = None, save_trace: bool = False,
        ntff_name: str | None = None,
    ) -> None:  # fmt: skip
        if (
            set(inputs) != set(self.input_tensors_info)
            or outputs is None
            or set(outputs) != set(self.output_tensors_info)
        ):
            raise NrtError("nrt_execute failed: NRT_EXEC_BAD_INPUT (1002)")
        for output, given in self._aliases:
            if outputs[f"output{output}"] is not inputs[f"input{given}"]:
                raise NrtError(f"nrt_execute failed: NRT_INVALID (2): output{output} is not input{given}")
        if any(tensor.core_id != self._core for tensor in (*inputs.values(), *outputs.values())):
            raise NrtError("nrt_execute failed: NRT_INVALID (2): a tensor of another core")
        results = self._group.run(self._rank, [inputs[f"input{i}"].array for i in range(len(inputs))])
        for i, result in enumerate(results):
            outputs[f"output{i}"].array[...] = result


class _Group:
    """The ranks of one module: the last one that comes runs it for all of them."""

    def __init__(self, text: str, ranks: int) -> None:
        self._text, self._ranks = text, ranks
        self._run: Any = None
        self._given: list[Any] = [None] * ranks
        self._results: list[Any] = []
        self._barrier = threading.Barrier(ranks, action=self._all)

    def run(self, rank: int, arrays: list[Any]) -> list[Any]:
        self._given[rank] = arrays
        self._barrier.wait(60)
        mine: list[Any] = self._results[rank]  # taken before this rank comes again, for which the others have to come
        return mine

    def _all(self) -> None:
        import jax

        devices = jax.devices("cpu")[: self._ranks]
        if self._run is None:
            self._run = _compiled(self._text, devices)
        arguments = [self._together(column, devices) for column in zip(*self._given, strict=True)]
        parts = self._run.execute_sharded(arguments).disassemble_into_single_device_arrays()
        self._results = [[np.asarray(part[rank]) for part in parts] for rank in range(self._ranks)]

    def _together(self, column: tuple[Any, ...], devices: list[Any]) -> Any:
        """The ranks' parts of one input, each on its device, as one array."""
        import jax

        size, *rest = np.shape(column[0]) or (0,)
        shape = (self._ranks * size, *rest) if np.ndim(column[0]) else ()
        placed = [jax.device_put(a, d) for a, d in zip(column, devices, strict=True)]
        return jax.make_array_from_single_device_arrays(shape, _over(devices, np.ndim(column[0])), placed)


def _over(devices: list[Any], rank: int) -> Any:
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    return NamedSharding(Mesh(np.array(devices), ("r",)), PartitionSpec(*(["r"] if rank else [])))


def _compiled(text: str, devices: list[Any]) -> Any:
    """The module as XLA's CPU runs it: Neuron's own call for the largest values is XLA's."""
    from jax._src.compiler import get_compile_options
    from jaxlib import _hlo, _jax

    plain = re.sub(
        r'custom-call\(([^)]*)\), custom_call_target="AwsNeuronTopK"(.*?), backend_config="?(\d+)"?',
        r"topk(\1), k=\3, largest=true\2", text,
    )  # fmt: skip
    plain = plain.replace(", api_version=API_VERSION_UNSPECIFIED", "")
    plain = plain.replace("must-alias", "may-alias")
    module = _hlo.hlo_module_from_text(plain).as_serialized_hlo_module_proto()
    order = np.arange(len(devices), dtype=np.int32).reshape(-1, 1)
    options = get_compile_options(num_replicas=len(devices), num_partitions=1, device_assignment=order)
    listed = _jax.DeviceList(tuple(devices))
    return devices[0].client.compile_and_load(_jax.mlir.hlo_to_stablehlo(module), listed, options)


def configure(visible_cores: object = None) -> None:
    """See the documentation; the fake has as many cores as the process has CPU devices."""


def reset() -> None:
    """A new runtime: nothing is loaded, and all memory is free."""
    _used.clear()
    _groups.clear()
    loaded.clear()


def _take(core: int, size: int) -> None:
    _used[core] = _used.get(core, 0) + size
    if _used[core] > memory:
        raise NrtError("nrt_tensor_allocate failed: NRT_RESOURCE (4)")


_groups = {}
