"""OpenVINO's core, opened once in a process, and its devices, by the names that `--device openvino:…` takes.

    name     = "CPU" | "GPU" [ "." index ] | "NPU" [ "." platform ]        GPU.1, NPU.4000: OpenVINO's own names

OpenVINO reads what stands behind "NPU." as the platform that is compiled for (src/plugins/intel_npu: DEVICE_ID and
NPU_PLATFORM), and finds at most one NPU in a host.
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
    """The core, with the CPU plugin loaded: without it a finished model's operators are unknown."""
    return _core()


@cache
def _core() -> ov.Core:
    core = ov.Core()
    core.get_versions("CPU")
    return core


def compilation_monitor() -> CallsMonitor:
    """Sees every model that the process compiles or imports, whoever does; importing one compiles its kernels."""

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
    """The CPU plugin's properties for so many threads, which it ties to CPUs unless these are better left to the system
    (cpus.may_pin)."""
    pinned: dict[str, Any] = {} if may_pin(threads) else {"ENABLE_CPU_PINNING": False}
    return {"INFERENCE_NUM_THREADS": threads} | pinned


WHOLE_SHAPES = {"SNIPPETS_MODE": "DISABLE"}
"""For the CPU plugin where all sizes are numbers: OpenVINO 2026.4.1 ends the process as it fuses an MLP of two products
with an activation between them, whose input is also added to its result."""


PRODUCT, SCALES = "FullyConnectedCompressed", 3
"""The CPU plugin's product with a matrix in codes, and which of its inputs are their scales."""
_KEPT = "keep_const_precision_0"
"""Marks constants that OpenVINO leaves in their type when it compiles (keep_const_precision.hpp)."""


def has_device(name: str) -> bool:
    """Whether `name` ("CPU", "GPU", "GPU.1", "NPU") is here."""
    return any(name in (device, device.split(".")[0]) for device in open_core().available_devices)


def require_device(name: str) -> None:
    """Raise DeviceError, saying which devices there are, when `name` is not here."""
    if not has_device(name):
        here = open_core().available_devices
        raise DeviceError(
            f"OpenVINO finds no {name} on this host; it finds {', '.join(here)}: install the driver of the device, or "
            f"compile with --device openvino:{here[0]}"
        )


def properties_for(settings: Mapping[str, Any], rows: int | None) -> dict[str, str]:
    """Those that the paged model of `rows` decode rows is compiled with, or the one for every shape (None)."""
    if rows is None:
        return dict(settings["properties"])
    return dict(next(found for most, found in settings["fixed_properties"] if most is None or rows <= most))


class MappedWeights:
    """A weights file in memory as a tensor; pages are read when needed, and can be dropped once they are packed."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self.tensor = ov.Tensor(np.frombuffer(self._map, np.uint8), shared_memory=True)

    def drop_pages(self) -> None:
        """Give back the pages read so far: what is asked for again is read again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


def read_paged(xml: bytes, weights: MappedWeights, shape: CacheShape, source: str) -> ov.Model:
    """A finished model, told what its XML does not say: that scales stay in their type, which else become float32 in
    memory of their own beside what products pack; and the heads of each attention, by the names of its caches.

    Raises ArtifactError for XML that OpenVINO cannot read, and for caches that `shape` does not have.
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
            raise ArtifactError(f"{source}: its model has a cache {caches[0].get_friendly_name()!r}, the manifest not")
        heads = [t.shape[0] for t in pair if t is not None]
        sizes = [width_of(node.input(i)) // heads[i - 1] for i in (1, 2)]
        facts = {"num_k_heads": heads[0], "k_head_size": sizes[0], "num_v_heads": heads[1], "v_head_size": sizes[1]}
        for each in (node, *caches):
            info: Any = each.get_rt_info()
            for name, value in facts.items():
                info[name] = value
    return model


def attentions(model: ov.Model) -> list[tuple[Any, list[Any]]]:
    """Each paged attention of a model, with the inputs that are its caches of keys and of values."""
    found = [node for node in model.get_ops() if node.get_type_name() == "PagedAttentionExtension"]
    return [(node, [node.input_value(i).get_node() for i in (3, 4)]) for node in found]


def cache_of(name: str, shape: CacheShape) -> CacheTensor | None:
    """The tensor that a paged model calls `name`, if there is one."""
    return dict(zip(cache_names(shape), shape.kv, strict=True)).get(name)


def width_of(port: Any) -> int:
    """The size of a port's last dimension; -1 where it is dynamic."""
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
"""What a compiled model of a device depends on, and the property that states it: those that OpenVINO's own cache keys
name (GPU: src/plugins/intel_gpu/src/plugin/plugin.cpp, caching properties)."""


def kind_of(device: str) -> str:
    """CPU, GPU or NPU."""
    return device.partition(".")[0]


def plugin_name(device: str) -> str:
    """What OpenVINO takes for a device of this host: an NPU without its platform."""
    return "NPU" if kind_of(device) == "NPU" else device


def facts_here(device: str) -> dict[str, str]:
    """What the device of this host is, as far as its plugin says: what a compiled model depends on."""
    found = {}
    for name, wanted in _FACTS.get(kind_of(device), {}).items():
        try:
            found[name] = str(open_core().get_property(plugin_name(device), wanted))
        except RuntimeError:
            continue
    return found


def host_of(kind: str) -> dict[str, str]:
    """What models finished for the GPUs or the NPU of this host are tied to; empty where there is none."""
    found: dict[str, str] = {}
    for device in open_core().available_devices:
        if kind_of(device) == kind:
            of = "" if device in (kind, f"{kind}.0") else f"{device} "
            found |= {f"{of}{name}": value for name, value in facts_here(device).items()}
    return {"openvino": version(), **found} if found else {}
