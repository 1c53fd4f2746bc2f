"""NVIDIA cards that this process may use, as the driver's own library (NVML) tells of them, and what a bundle asks of
them, checked before anything is loaded.

NVML comes with the driver; it is reached through nvidia-ml-py (module pynvml, 13.x), and opens no CUDA context, so it
costs milliseconds and no memory of a card.

Which cards: CUDA_VISIBLE_DEVICES names them by number, or by the beginning of a UUID ("GPU-8b5c", "MIG-…"), in the
order of the process's own numbers. An entry that names no card, or several, ends the list; one that names a card again
leaves none at all. Source: torch/cuda/__init__.py, _parse_visible_devices (torch 2.13). Numbers are NVML's, in the
order of the PCI bus. CUDA's own differ from them only where a host mixes sorts of cards and CUDA_DEVICE_ORDER is not
PCI_BUS_ID; name cards by UUID there.

Which drivers: a program of one CUDA major version runs on any driver of that major version or a later one, also where
its minor version is newer, as long as it holds machine code and no PTX to be compiled by the driver. Source: CUDA
Compatibility guide, "Minor Version Compatibility", and the CUDA 13.1 release notes, table "Minimum Required Driver
Version for CUDA Minor Version Compatibility" (13.x: 580, 12.x: 525, Linux).
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
"""The first driver (its branch, the number before the first point) on which programs of a CUDA major version run."""


@dataclass(frozen=True)
class Gpu:
    """A card, or a slice of one (MIG). `index`: this process's number of it; sizes in bytes, versions (major, minor).

    `cuda` is the newest CUDA that the driver knows. `free` is what no process holds at the moment.
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
    """What a bundle asks of the cards that it runs on; None and 0 ask for nothing.

    Each of `cards` cards has to be of exactly this `compute_capability` (machine code for 9.0a or 10.0a runs on no
    other), with a driver for CUDA `cuda` (major) and room for `memory`, in bytes by what they are for.
    """

    cards: int = 1
    compute_capability: tuple[int, int] | None = None
    cuda: int | None = None
    memory: Mapping[str, int] | None = None
    made_for: str = ""
    """The card that it was compiled for, for people: "NVIDIA H100 SXM5 80 GB"."""


def gpus() -> tuple[Gpu, ...]:
    """The cards that this process may use, in the order of its own numbers; none on a host without card or driver.

    Raises DeviceError where there is a driver that does not answer, in NVML's words.
    """
    with _nvml() as nvml:
        return () if nvml is None else tuple(_gpu(nvml, i, h) for i, h in enumerate(_visible(nvml)))


class NvidiaCards:
    """NVIDIA's cards as `llmc devices` shows them: what the driver says of each, else what the kernel shows."""

    name = NVIDIA_GPU.name

    def found(self, root: Path | None = None) -> str:
        """In words; "" for none. `root` is where /sys and /dev lie."""
        try:
            cards = [f"{len(list(same))} × {card}" for card, same in groupby(map(str, gpus()))]
        except DeviceError as error:
            return f"{NVIDIA_GPU.found(root) or NVIDIA_GPU.name} ({error})"
        return ", ".join(cards) or NVIDIA_GPU.found(root)


def require_gpu(source: str, needs: Needs, found: Sequence[Gpu] | None = None) -> tuple[Gpu, ...]:
    """The first `needs.cards` cards of this process, which can run what `source` (a bundle's path) holds.

    `found` instead of `gpus()`, where they were asked already. Checked in this order, with the first error raised:
    DeviceError for no card, too few cards and an older driver, ArtifactError for another compute capability,
    OutOfDeviceMemoryError for too little free memory, naming what it is for and how much is missing.
    """
    found = gpus() if found is None else found
    if not found:
        raise DeviceError(f"{source}: needs {_cards(needs)}; {_why_none()}")
    if len(found) < needs.cards:
        raise DeviceError(
            f"{source}: needs {_cards(needs)}, this process has {len(found)}{_set()}; run it on a host with "
            f"{needs.cards}, or compile it for fewer"
        )
    used = tuple(found[: needs.cards])
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
        made_for = (
            f"{needs.made_for}, compute capability {wanted}" if needs.made_for else f"compute capability {wanted}"
        )
        raise ArtifactError(f"{source}: compiled for {made_for}; card {gpu.index} is {gpu}; compile it for this card")


def _require_memory(source: str, needs: Needs, gpu: Gpu) -> None:
    needed = sum((needs.memory or {}).values())
    if needed > gpu.free:
        parts = ", ".join(f"{name} {size_text(size)}" for name, size in (needs.memory or {}).items())
        raise OutOfDeviceMemoryError(
            f"{source}: needs {size_text(needed)} of card {gpu.index} ({parts}), {size_text(needed - gpu.free)} more "
            f"than is free: {size_text(gpu.free)} of {gpu.name}'s {size_text(gpu.total)}; end what holds the rest, or "
            "compile it with fewer or shorter sequences, or for more cards"
        )


def _why_none() -> str:
    """Why this process has no card, as far as the host shows it."""
    if find_spec("pynvml") is None:
        return f"nvidia-ml-py, which asks the driver for cards, is not installed: {INSTALL}"
    shown = NVIDIA_GPU.found()
    return f"this process may use none: the host has {shown or 'no NVIDIA card'}{_set()}"


def _set() -> str:
    wanted = cuda_visible_devices()
    return "" if wanted is None else f" (CUDA_VISIBLE_DEVICES={wanted})"


def _cards(needs: Needs) -> str:
    return "an NVIDIA card" if needs.cards == 1 else f"{needs.cards} NVIDIA cards"


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


@contextmanager
def _nvml() -> Iterator[Any]:
    """NVML, initialised; None where the driver, a card, or nvidia-ml-py is not there."""
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
        raise DeviceError(f"the NVIDIA driver tells nothing of a card: {e}; see what nvidia-smi says") from e
    finally:
        pynvml.nvmlShutdown()


def _visible(nvml: Any) -> list[Any]:
    """Handles of the cards that CUDA_VISIBLE_DEVICES leaves."""
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
