"""NVML as nvidia-ml-py gives it to Python, over GPUs that a test describes.

Source: nvidia-ml-py 13.x, pynvml.py (names, arguments, errors, `NVMLError.value`; strings come as str). As there, every
function but nvmlInit fails before nvmlInit, nvmlInit and nvmlShutdown are counted, and where the driver's library or
its kernel module is missing it is nvmlInit that fails. test_pynvml.py compares names and arguments with the real one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

NVML_ERROR_UNINITIALIZED = 1
NVML_ERROR_INVALID_ARGUMENT = 2
NVML_ERROR_NOT_FOUND = 6
NVML_ERROR_DRIVER_NOT_LOADED = 9
NVML_ERROR_LIBRARY_NOT_FOUND = 12
NVML_ERROR_GPU_IS_LOST = 15
NVML_ERROR_LIB_RM_VERSION_MISMATCH = 18
_WORDS = {
    NVML_ERROR_UNINITIALIZED: "Uninitialized",
    NVML_ERROR_INVALID_ARGUMENT: "Invalid Argument",
    NVML_ERROR_NOT_FOUND: "Not Found",
    NVML_ERROR_DRIVER_NOT_LOADED: "Driver Not Loaded",
    NVML_ERROR_LIBRARY_NOT_FOUND: "NVML Shared Library Not Found",
    NVML_ERROR_GPU_IS_LOST: "GPU is lost",
    NVML_ERROR_LIB_RM_VERSION_MISMATCH: "RM has detected an NVML/RM version mismatch.",
}


class NVMLError(Exception):
    """One of NVML's errors, as its own class."""

    def __new__(cls, value: int) -> NVMLError:
        error = Exception.__new__({c.code: c for c in NVMLError.__subclasses__()}.get(value, cls))
        error.value = value
        return error

    def __str__(self) -> str:
        return _WORDS[self.value]


class NVMLError_Uninitialized(NVMLError):
    code = NVML_ERROR_UNINITIALIZED


class NVMLError_InvalidArgument(NVMLError):
    code = NVML_ERROR_INVALID_ARGUMENT


class NVMLError_NotFound(NVMLError):
    code = NVML_ERROR_NOT_FOUND


class NVMLError_DriverNotLoaded(NVMLError):
    code = NVML_ERROR_DRIVER_NOT_LOADED


class NVMLError_LibraryNotFound(NVMLError):
    code = NVML_ERROR_LIBRARY_NOT_FOUND


class NVMLError_GpuIsLost(NVMLError):
    code = NVML_ERROR_GPU_IS_LOST


class NVMLError_LibRmVersionMismatch(NVMLError):
    code = NVML_ERROR_LIB_RM_VERSION_MISMATCH


@dataclass
class Device:
    """A GPU of the fake host; memory in bytes. `lost`: it fell off the bus."""

    name: str = "NVIDIA H100 80GB HBM3"
    uuid: str = "GPU-11111111-0000-0000-0000-000000000000"
    capability: tuple[int, int] = (9, 0)
    total: int = 80 << 30
    used: int = 1 << 30
    lost: bool = False


@dataclass
class _Memory:
    total: int
    free: int
    used: int


@dataclass
class _Host:
    gpus: Sequence[Device]
    driver: str
    cuda: int
    fails: int | None
    """What nvmlInit fails with; None: it does not."""
    opened: int = 0


_host = _Host((), "", 0, NVML_ERROR_LIBRARY_NOT_FOUND)


def set_host(
    *gpus: Device, driver: str = "580.95.05", cuda: int = 13000, fails: int | None = None
) -> None:  # not NVML's: the host that the functions tell of from now on
    global _host  # noqa: PLW0603 - NVML is the process's
    _host = _Host(gpus, driver, cuda, fails)


def open_count() -> int:  # not NVML's: nvmlInit without nvmlShutdown
    return _host.opened


def nvmlInit() -> None:
    if _host.fails is not None:
        raise NVMLError(_host.fails)
    _host.opened += 1


def nvmlShutdown() -> None:
    _opened().opened -= 1


def nvmlDeviceGetCount() -> int:
    return len(_opened().gpus)


def nvmlDeviceGetHandleByIndex(index: int) -> Device:
    if not 0 <= index < len(_opened().gpus):
        raise NVMLError(NVML_ERROR_INVALID_ARGUMENT)
    return _alive(_host.gpus[index])


def nvmlDeviceGetHandleByUUID(uuid: str) -> Device:
    for gpu in _opened().gpus:
        if gpu.uuid == uuid:
            return _alive(gpu)
    raise NVMLError(NVML_ERROR_NOT_FOUND)


def nvmlDeviceGetUUID(handle: Device) -> str:
    _opened()
    return handle.uuid


def nvmlDeviceGetName(handle: Device) -> str:
    _opened()
    return handle.name


def nvmlDeviceGetMemoryInfo(handle: Device, version: Any = None) -> _Memory:
    _opened()
    return _Memory(handle.total, handle.total - handle.used, handle.used)


def nvmlDeviceGetCudaComputeCapability(handle: Device) -> tuple[int, int]:
    _opened()
    return handle.capability


def nvmlSystemGetDriverVersion() -> str:
    return _opened().driver


def nvmlSystemGetCudaDriverVersion_v2() -> int:
    return _opened().cuda


def _opened() -> _Host:
    if not _host.opened:
        raise NVMLError(NVML_ERROR_UNINITIALIZED)
    return _host


def _alive(gpu: Device) -> Device:
    if gpu.lost:
        raise NVMLError(NVML_ERROR_GPU_IS_LOST)
    return gpu
