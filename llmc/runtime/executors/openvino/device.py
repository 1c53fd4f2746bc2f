"""OpenVINO's core, opened once per process, and its devices by the names in `--device openvino:…`.

    name     = "CPU" | "GPU" [ "." index ] | "NPU" [ "." platform ]        GPU.1, NPU.4000: OpenVINO's own names

OpenVINO takes the suffix of "NPU." as the target platform (src/plugins/intel_npu: DEVICE_ID and NPU_PLATFORM), and
finds at most one NPU in a host.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import openvino as ov

from llmc.cpus import may_pin
from llmc.errors import ArtifactError, DeviceError
from llmc.runtime.executors.compilations import CallsMonitor
from llmc.runtime.executors.openvino.blocks import cache_names

if TYPE_CHECKING:
    from llmc.runtime.cache_shape import CacheShape, CacheTensor


def open_core() -> ov.Core:
    """The core with the CPU plugin loaded; without the plugin, a compiled model's operators are unknown."""
    return _core()


@cache
def _core() -> ov.Core:
    core = ov.Core()
    core.get_versions("CPU")
    return core


def compilation_monitor() -> CallsMonitor:
    """A monitor of every model that the process compiles or imports. Importing one compiles its kernels."""

    def compiled(model: Any, device: str | None = None, *_: Any, **__: Any) -> str:
        name = model.get_friendly_name() if hasattr(model, "get_friendly_name") else str(model)
        return f"compile_model {name:.80} for {device or 'AUTO'}"

    def imported(_model: Any, device: str, *_: Any, **__: Any) -> str:
        return f"import_model for {device}"

    return CallsMonitor("OpenVINO compile calls", ov.Core, {"compile_model": compiled, "import_model": imported})


def version() -> str:
    """OpenVINO's version, as its package states it."""
    return str(ov.__version__).split("-", maxsplit=1)[0]


def with_threads(threads: int) -> dict[str, Any]:
    """The CPU plugin's properties for so many threads, pinned to CPUs if `cpus.may_pin`."""
    pinned: dict[str, Any] = {} if may_pin(threads) else {"ENABLE_CPU_PINNING": False}
    return {"INFERENCE_NUM_THREADS": threads} | pinned


WHOLE_SHAPES = {"SNIPPETS_MODE": "DISABLE"}
"""For CPU plugin models with static shapes. OpenVINO 2026.4.1 crashes the process when it fuses an MLP of two matmuls
with an activation between them, whose input is also added to its result.
"""


PRODUCT, SCALES = "FullyConnectedCompressed", 3
"""The CPU plugin's matmul with a quantized matrix, and the indices of its scale inputs."""
_KEPT = "keep_const_precision_0"
"""Marks constants whose type OpenVINO keeps when it compiles (keep_const_precision.hpp)."""


def has_device(name: str) -> bool:
    """Whether `name` ("CPU", "GPU", "GPU.1", "NPU.4000") is available."""
    name = plugin_name(name)
    return any(name in (device, device.split(".")[0]) for device in open_core().available_devices)


def require_device(name: str) -> None:
    """Raise DeviceError, listing the available devices, if `name` is not among them."""
    if not has_device(name):
        here = open_core().available_devices
        raise DeviceError(
            f"OpenVINO finds no {name} on this host; it finds {', '.join(here)}: install the driver of the device, or "
            f"compile with --device openvino:{here[0]}"
        )


def properties_for(settings: Mapping[str, Any], rows: int | None) -> dict[str, str]:
    """Compilation properties of the paged model for `rows` decode rows, or of the one for every shape (None)."""
    if rows is None:
        return dict(settings["properties"])
    return dict(next(found for most, found in settings["fixed_properties"] if most is None or rows <= most))


class MappedWeights:
    """A mapped weights file as a tensor. Pages are read on demand and can be dropped once they are packed."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self.tensor = ov.Tensor(np.frombuffer(self._map, np.uint8), shared_memory=True)

    def drop_pages(self) -> None:
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


def read_paged(xml: bytes, weights: MappedWeights, shape: CacheShape, source: str) -> ov.Model:
    """Read a compiled paged model and add what its XML lacks: the constant type of scales, and attention heads.

    Scales would otherwise become float32 copies in addition to the packed matrices. Heads come from the caches' names.
    Raises ArtifactError for XML that OpenVINO cannot read, and for caches that `shape` lacks.
    """
    try:
        model = open_core().read_model(xml, weights.tensor)
    except RuntimeError as e:
        raise ArtifactError(f"{source}: OpenVINO {version()} cannot read the model: {str(e).splitlines()[-1]}") from e
    for node in model.get_ops():
        if node.get_type_name() == PRODUCT:
            node.input_value(SCALES).get_node().get_rt_info()[_KEPT] = True
    for node, caches in attentions(model):
        pair = [cache_of(cache.get_friendly_name(), shape) for cache in caches]
        if None in pair:
            raise ArtifactError(f"{source}: its manifest lacks the cache {caches[0].get_friendly_name()!r}")
        heads = [t.shape[0] for t in pair if t is not None]
        sizes = [width_of(node.input(i)) // heads[i - 1] for i in (1, 2)]
        facts = {"num_k_heads": heads[0], "k_head_size": sizes[0], "num_v_heads": heads[1], "v_head_size": sizes[1]}
        for each in (node, *caches):
            info: Any = each.get_rt_info()
            for name, value in facts.items():
                info[name] = value
    return model


def attentions(model: ov.Model) -> list[tuple[Any, list[Any]]]:
    """Each paged attention of a model, with its inputs for key caches and value caches."""
    found = [node for node in model.get_ops() if node.get_type_name() == "PagedAttentionExtension"]
    return [(node, [node.input_value(i).get_node() for i in (3, 4)]) for node in found]


def cache_of(name: str, shape: CacheShape) -> CacheTensor | None:
    """The tensor that a paged model calls `name`, or None."""
    return dict(zip(cache_names(shape), shape.kv, strict=True)).get(name)


def width_of(port: Any) -> int:
    """The size of a port's last dimension; -1 if dynamic."""
    shape = port.get_partial_shape()
    return -1 if shape.rank.is_dynamic or shape[-1].is_dynamic else int(shape[-1].get_length())


_FACTS: Mapping[str, Mapping[str, str]] = MappingProxyType({
    "GPU": {
        "architecture": "DEVICE_ARCHITECTURE",
        "execution units": "GPU_EXECUTION_UNITS_COUNT",
        "driver": "GPU_DRIVER_VERSION",
    },
    "NPU": {"platform": "DEVICE_ARCHITECTURE", "driver": "NPU_DRIVER_VERSION"},
})  # fmt: skip
"""Facts that a device's compiled model depends on, and their properties: those in OpenVINO's own cache keys (GPU:
src/plugins/intel_gpu/src/plugin/plugin.cpp, caching properties).
"""


def kind_of(device: str) -> str:
    """CPU, GPU or NPU."""
    return device.partition(".")[0]


def plugin_name(device: str) -> str:
    """OpenVINO's name for a device of this host: an NPU without its platform."""
    return "NPU" if kind_of(device) == "NPU" else device


def facts_here(device: str) -> dict[str, str]:
    """Facts about this host's device, from its plugin, that a compiled model depends on."""
    found = {}
    for name, wanted in _FACTS.get(kind_of(device), {}).items():
        try:
            found[name] = str(open_core().get_property(plugin_name(device), wanted))
        except RuntimeError:
            continue
    return found


def host_of(kind: str) -> dict[str, str]:
    """Facts that models compiled on their target depend on, for this host's GPUs or NPU; empty without one."""
    found: dict[str, str] = {}
    for device in open_core().available_devices:
        if kind_of(device) == kind:
            of = "" if device in (kind, f"{kind}.0") else f"{device} "
            found |= {f"{of}{name}": value for name, value in facts_here(device).items()}
    return {"openvino": version(), **found} if found else {}
