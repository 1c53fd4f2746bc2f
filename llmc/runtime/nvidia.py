"""NVIDIA GPUs visible to this process, from the driver's library NVML, and a bundle's GPU requirements.

Requirements are checked before anything is loaded. NVML comes with the driver. nvidia-ml-py (module pynvml, 13.x) calls
it without a CUDA context, so this takes milliseconds and no GPU memory.

Visible GPUs: CUDA_VISIBLE_DEVICES selects GPUs by number or by UUID prefix ("GPU-8b5c", "MIG-…") and defines this
process's numbering. An entry that matches no GPU, or several, ends the list. A duplicate entry leaves no GPU at all.
Source: torch/cuda/__init__.py, _parse_visible_devices (torch 2.13). Numbers are NVML's, in PCI bus order. CUDA's own
differ only on hosts with mixed GPU models and CUDA_DEVICE_ORDER other than PCI_BUS_ID; use UUIDs there.

Drivers: a program of one CUDA major version runs on any driver of that or a later major version, even an older minor
one, if it contains machine code and no PTX for the driver to compile. Source: CUDA Compatibility guide, "Minor Version
Compatibility", and the CUDA 13.1 release notes, table "Minimum Required Driver Version for CUDA Minor Version
Compatibility" (13.x: 580, 12.x: 525, Linux).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

from llmc.buckets.render.text import size_text
from llmc.errors import ArtifactError, DeviceError, OutOfDeviceMemoryError
from llmc.runtime.accelerators import NVIDIA_GPU
from llmc.settings import cuda_visible_devices

INSTALL = "pip install nvidia-ml-py"
OLDEST_DRIVERS: Mapping[int, int] = {12: 525, 13: 580}
"""The first driver branch (the number before the first dot) for each CUDA major version."""


@dataclass(frozen=True)
class Gpu:
    """A GPU, or a MIG slice. `index` is its number in this process; sizes are in bytes, versions (major, minor).

    `cuda` is the newest CUDA version that the driver supports. `free` is the memory that no process holds now.
    """

    index: int
    name: str
    compute_capability: tuple[int, int]
    total: int
    free: int
    driver: str
    cuda: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.name} (compute capability {_dotted(self.compute_capability)}, {size_text(self.total)})"


@dataclass(frozen=True)
class Needs:
    """A bundle's GPU requirements; None and 0 mean no requirement.

    Each of `count` GPUs must have exactly this `compute_capability`, because machine code for 9.0a or 10.0a runs on no
    other. It needs a driver for CUDA `cuda` (major) and room for `memory`, in bytes by purpose.
    """

    count: int = 1
    compute_capability: tuple[int, int] | None = None
    cuda: int | None = None
    memory: Mapping[str, int] | None = None
    built_for: str = ""
    """The GPU that it was compiled for, for messages: "NVIDIA H100 SXM5 80 GB"."""


def gpus() -> tuple[Gpu, ...]:
    """The GPUs that this process may use, in its own numbering; empty without a GPU or driver.

    Raises DeviceError with NVML's message if the driver does not answer.
    """
    with _nvml() as nvml:
        return () if nvml is None else tuple(_gpu(nvml, i, h) for i, h in enumerate(_visible(nvml)))


class NvidiaGpus:
    """NVIDIA GPUs for `llmc devices`, from the driver if it answers, otherwise from the kernel."""

    name = NVIDIA_GPU.name

    def found(self, root: Path | None = None) -> str:
        """Describe the GPUs; "" if there are none. /sys and /dev are read below `root`."""
        try:
            named = [f"{len(list(same))} × {gpu}" for gpu, same in groupby(map(str, gpus()))]
        except DeviceError as error:
            return f"{NVIDIA_GPU.found(root) or NVIDIA_GPU.name} ({error})"
        return ", ".join(named) or NVIDIA_GPU.found(root)


def require_gpu(source: str, needs: Needs, found: Sequence[Gpu] | None = None) -> tuple[Gpu, ...]:
    """The first `needs.count` GPUs of this process, after checking that they can run `source` (a bundle's path).

    `found` may pass the result of an earlier `gpus()` call. Raises the first error in this order: DeviceError for no
    GPU, too few GPUs or an old driver; ArtifactError for another compute capability; OutOfDeviceMemoryError for too
    little free memory, naming each purpose and the missing bytes.
    """
    found = gpus() if found is None else found
    if not found:
        raise DeviceError(f"{source}: needs {_wanted(needs)}; {_why_none()}")
    if len(found) < needs.count:
        raise DeviceError(
            f"{source}: needs {_wanted(needs)}, this process has {len(found)}{_set()}; run it on a host with "
            f"{needs.count}, or compile it for fewer"
        )
    used = tuple(found[: needs.count])
    _require_driver(source, needs, used[0])
    for gpu in used:
        _require_capability(source, needs, gpu)
    for gpu in used:
        _require_memory(source, needs, gpu)
    return used


def _require_driver(source: str, needs: Needs, gpu: Gpu) -> None:
    if needs.cuda is not None and gpu.cuda[0] < needs.cuda:
        oldest = OLDEST_DRIVERS.get(needs.cuda)
        raise DeviceError(
            f"{source}: compiled for CUDA {needs.cuda}; this host's driver {gpu.driver} knows CUDA up to "
            f"{_dotted(gpu.cuda)}; install driver {oldest or 'of that CUDA'} or newer"
        )


def _require_capability(source: str, needs: Needs, gpu: Gpu) -> None:
    if needs.compute_capability not in (None, gpu.compute_capability):
        wanted = _dotted(needs.compute_capability or (0, 0))
        built_for = (
            f"{needs.built_for}, compute capability {wanted}" if needs.built_for else f"compute capability {wanted}"
        )
        raise ArtifactError(f"{source}: compiled for {built_for}; GPU {gpu.index} is {gpu}; compile it for this GPU")


def _require_memory(source: str, needs: Needs, gpu: Gpu) -> None:
    needed = sum((needs.memory or {}).values())
    if needed > gpu.free:
        parts = ", ".join(f"{name} {size_text(size)}" for name, size in (needs.memory or {}).items())
        raise OutOfDeviceMemoryError(
            f"{source}: needs {size_text(needed)} of GPU {gpu.index} ({parts}), {size_text(needed - gpu.free)} more "
            f"than is free: {size_text(gpu.free)} of {gpu.name}'s {size_text(gpu.total)}; end what holds the rest, or "
            "compile it with fewer or shorter sequences, or for more GPUs"
        )


def _why_none() -> str:
    if find_spec("pynvml") is None:
        return f"nvidia-ml-py, which queries the driver for GPUs, is not installed: {INSTALL}"
    shown = NVIDIA_GPU.found()
    return f"this process may use none: the host has {shown or 'no NVIDIA GPU'}{_set()}"


def _set() -> str:
    wanted = cuda_visible_devices()
    return "" if wanted is None else f" (CUDA_VISIBLE_DEVICES={wanted})"


def _wanted(needs: Needs) -> str:
    return "an NVIDIA GPU" if needs.count == 1 else f"{needs.count} NVIDIA GPUs"


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


@contextmanager
def _nvml() -> Iterator[Any]:
    """NVML, initialised; None without a driver, a GPU or nvidia-ml-py."""
    try:
        import pynvml
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        yield None
        return
    except pynvml.NVMLError as e:
        raise DeviceError(f"the NVIDIA driver does not answer: {e}; see what nvidia-smi says") from e
    try:
        yield pynvml
    except pynvml.NVMLError as e:
        raise DeviceError(f"the NVIDIA driver cannot describe a GPU: {e}; see what nvidia-smi says") from e
    finally:
        pynvml.nvmlShutdown()


def _visible(nvml: Any) -> list[Any]:
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    wanted = cuda_visible_devices()
    if wanted is None:
        return handles
    visible: dict[str, Any] = {}
    for entry in wanted.split(","):
        handle = _named(nvml, entry.strip(), handles)
        if handle is None:
            break
        uuid = nvml.nvmlDeviceGetUUID(handle)
        if uuid in visible:
            return []
        visible[uuid] = handle
    return list(visible.values())


def _named(nvml: Any, entry: str, handles: Sequence[Any]) -> Any:
    if entry.isdecimal():
        return handles[int(entry)] if int(entry) < len(handles) else None
    if entry.startswith("MIG-"):
        try:
            return nvml.nvmlDeviceGetHandleByUUID(entry)
        except nvml.NVMLError_NotFound:
            return None
    found = [h for h in handles if entry and nvml.nvmlDeviceGetUUID(h).startswith(entry)]
    return found[0] if len(found) == 1 else None


def _gpu(nvml: Any, index: int, handle: Any) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
    return Gpu(
        index, nvml.nvmlDeviceGetName(handle), tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)),
        memory.total, memory.free, nvml.nvmlSystemGetDriverVersion(), (cuda // 1000, cuda % 1000 // 10),
    )  # fmt: skip
