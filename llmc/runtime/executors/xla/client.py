"""Configures JAX and opens its client, for compiling and for replaying. No other module does.

A process has one JAX with one set of devices, fixed at its first computation. `open_client` sets options before that
and raises if something else came first. JAX is imported on use, never by importing this file.

JAX reports every compilation of its backend to the process's listeners (`jax.monitoring`), in the requesting thread.
Loading an executable is not reported. Here reports are forwarded to the executor whose call is running.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, Literal

from llmc.errors import DeviceError
from llmc.platforms import how_to_install
from llmc.runtime.executors.compilations import Monitor

LIBTPU_ENVIRONMENT: Mapping[str, str] = MappingProxyType(
    {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # otherwise one process per host, by a lock file
        "TPU_LOG_DIR": "disabled",  # a keyword of libtpu, not a folder
        "TPU_SKIP_MDS_QUERY": "1",  # do not query a metadata server
        "TPU_ACCELERATOR_TYPE": "v5litepod-1",  # any known type: silences "Failed to find host bounds"
        "TPU_WORKER_HOSTNAMES": "localhost",  # silences "unexpected worker hostname"
    }
)
"""Variables for libtpu on hosts without a TPU, where it is only a compiler. Set before JAX first requests a topology;
variables set by the user stay. On a TPU host they would describe another machine.

Determined by experiment with libtpu 0.0.42: without these it writes warnings to stderr and logs to /tmp/tpu_logs, looks
for the metadata server of a Google Cloud host, and refuses a second process. Executables have equal bytes with and
without them, and under any TPU_ACCELERATOR_TYPE, so they are in no key.
"""


Platform = Literal["cpu", "tpu", "cuda"]
COMPILERS = {"tpu": "libtpu", "cuda": "jax-cuda13-pjrt"}
"""The package with XLA's compiler for a platform, if not in jaxlib."""


CUDA_MEMORY_FRACTION = 0.9
"""Fraction of a GPU's memory that XLA may reserve for arrays and temporary buffers. The rest is for memory outside its
pool: CUDA's context, the code of executables, NCCL. XLA's default is 0.75 (GpuAllocatorConfig::memory_fraction,
xla/pjrt/plugin/xla_gpu/xla_gpu_allocator_config.h); vLLM's is 0.9 too.
"""


def platform_of(devices: Sequence[Any]) -> Platform:
    """The platform that such JAX devices are compiled for; JAX calls all vendors' GPUs "gpu"."""
    name = devices[0].platform
    return "cuda" if name == "gpu" else name


def jax_version() -> str:
    """The installed jax and jaxlib, without importing them; raises DeviceError with the install command."""
    try:
        return f"{metadata.version('jax')} {metadata.version('jaxlib')}"
    except metadata.PackageNotFoundError:
        raise DeviceError(f"jax is not installed; {how_to_install('jax', 'xla')}") from None


def toolchain_version(platform: str) -> str:
    """Versions that native code for `platform` depends on: jax, jaxlib, compiler package; raises DeviceError."""
    try:
        compiler = metadata.version(COMPILERS[platform]) if platform in COMPILERS else ""
    except metadata.PackageNotFoundError:
        compiler = ""
    return f"{jax_version()} {compiler}".strip()


def has_tpu() -> bool:
    """Whether this process could use a TPU: libtpu is installed, and the kernel shows a TPU device."""
    return find_spec("libtpu") is not None and any(os.path.exists(p) for p in ("/dev/accel0", "/dev/vfio/0"))  # noqa: PTH110


def open_client(platform: Platform, devices: int = 1, threads: int | None = None) -> list[Any]:
    """The first `devices` JAX devices of `platform`, after configuring JAX.

    The CPU is divided into that many devices, each with `threads` threads. Raises DeviceError if JAX is missing, or
    already runs with fewer.
    """
    jax_version()
    if not has_tpu():
        for name, value in LIBTPU_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
    import jax
    from jax._src import lib

    jax.config.update("jax_traceback_in_locations_limit", 0)  # otherwise executables contain source paths
    if platform == "cpu":
        lib.cuda_path = None  # otherwise executables of every platform contain the path of the nvidia packages
        if threads is not None:
            os.environ.setdefault("NPROC", str(threads))  # XLA sizes its thread pool by it
        before_start(jax, "jax_platforms", "cpu")
        if devices > 1:
            before_start(jax, "jax_num_cpu_devices", devices)
    listen()
    found = jax.devices(platform)
    if len(found) < devices:
        raise DeviceError(
            f"{devices} {platform} devices are needed, this process has {len(found)}"
            + ("; JAX was started in it before: use a new process" if platform == "cpu" else "")
        )
    return list(found[:devices])


def before_start(jax: Any, option: str, value: Any) -> None:
    """Set a JAX option that counts only before its first computation; later, do nothing."""
    from jax._src import xla_bridge

    if not xla_bridge.backends_are_initialized():
        jax.config.update(option, value)


COMPILED = "/jax/core/compile/backend_compile_duration"
"""JAX's event name."""

_lock = threading.Lock()
_listens = False
_here = threading.local()
_compiled: list[str] = []


@contextmanager
def reporting(report: Callable[[str], None] | None) -> Iterator[None]:
    """Call `report` for each JAX compilation in this thread inside the block; None: no calls."""
    before = getattr(_here, "report", None)
    _here.report = report
    try:
        yield
    finally:
        _here.report = before


def listen() -> None:
    """Listen to JAX's compilations from now on."""
    global _listens  # noqa: PLW0603 - JAX keeps listeners for the whole process
    from jax import monitoring

    with _lock:
        if not _listens:
            monitoring.register_event_duration_secs_listener(_heard)
            _listens = True


def listens() -> bool:
    """Whether every compilation since JAX's first has been reported here."""
    return _listens


class JaxMonitor(Monitor):
    """Sees each JAX compilation in the process, in any thread, after `listen`."""

    name = "JAX compile events"

    def __init__(self) -> None:
        self._first = len(_compiled)

    def what(self) -> Sequence[str]:
        return tuple(_compiled[self._first :])


def _heard(event: str, duration: float, **facts: Any) -> None:
    if event != COMPILED:
        return
    what = f"jax: {facts.get('fun_name', 'a program')}"
    _compiled.append(what)
    report = getattr(_here, "report", None)
    if report is not None:
        report(what)
