"""OpenVINO's core, opened once in a process, and what its devices are."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov

from llmc.cpus import may_pin
from llmc.errors import ArtifactError, DeviceError
from llmc.runtime.executors.witness import CallsWitness


def open_core() -> ov.Core:
    """The core, with the CPU plugin loaded: without it a finished model's operators are unknown."""
    return _core()


@cache
def _core() -> ov.Core:
    core = ov.Core()
    core.get_versions("CPU")
    return core


def compile_witness() -> CallsWitness:
    """Sees every model that the process compiles or imports, whoever does; importing one compiles its kernels."""

    def compiled(model: Any, device: str | None = None, *_: Any, **__: Any) -> str:
        name = model.get_friendly_name() if hasattr(model, "get_friendly_name") else str(model)
        return f"compile_model {name:.80} for {device or 'AUTO'}"

    def imported(_model: Any, device: str, *_: Any, **__: Any) -> str:
        return f"import_model for {device}"

    return CallsWitness("OpenVINO compile calls", ov.Core, {"compile_model": compiled, "import_model": imported})


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


def read_paged(xml: bytes, weights: MappedWeights, kv_heads: int, head_dim: int, source: str) -> ov.Model:
    """A finished model, told the heads of its attention, which its XML does not say.

    Raises ArtifactError for XML that OpenVINO cannot read.
    """
    try:
        model = open_core().read_model(xml, weights.tensor)
    except RuntimeError as e:
        raise ArtifactError(f"{source}: OpenVINO {version()} cannot read the model: {str(e).splitlines()[-1]}") from e
    heads = {"num_k_heads": kv_heads, "k_head_size": head_dim, "num_v_heads": kv_heads, "v_head_size": head_dim}
    for node in model.get_ops():
        if node.get_type_name() == "PagedAttentionExtension":
            for told in (node, node.input_value(3).get_node(), node.input_value(4).get_node()):
                info: Any = told.get_rt_info()
                for name, value in heads.items():
                    info[name] = value
    return model
