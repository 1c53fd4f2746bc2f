"""The one place where JAX is configured and its client opened, for compiling and for replaying.

A process has one JAX, with one set of devices, fixed when it first computes: `open_client` sets what it needs before
that, and says so when something else came first. JAX is imported here and below, never by importing this file.

JAX reports every compilation of its backend to listeners of the process (`jax.monitoring`), in the thread that asked
for it. Loading an executable is none. Here these are passed to the executor in whose call they happen.
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
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else one process a host, by a lock file
        "TPU_LOG_DIR": "disabled",  # a word that libtpu knows, not a folder
        "TPU_SKIP_MDS_QUERY": "1",  # no metadata server is asked
        "TPU_ACCELERATOR_TYPE": "v5litepod-1",  # any known type: silences "Failed to find host bounds"
        "TPU_WORKER_HOSTNAMES": "localhost",  # silences "unexpected worker hostname"
    }
)
"""Variables for libtpu on hosts without a TPU, where it is only a compiler. Set before JAX first asks for a
topology; what the user has set already stays. Where there is a TPU, it would describe another machine to it.

Found by trying, with libtpu 0.0.42: without these it writes warnings to stderr and logs to /tmp/tpu_logs, looks for the
metadata server of a Google Cloud host, and refuses a second process. Executables are the same bytes with and without
them, and under any TPU_ACCELERATOR_TYPE, so they are in no key.
"""


Platform = Literal["cpu", "tpu", "cuda"]
COMPILERS = {"tpu": "libtpu", "cuda": "jax-cuda13-pjrt"}
"""The package that holds XLA's compiler for a platform, where jaxlib does not."""


CUDA_MEMORY_FRACTION = 0.9
"""What XLA may reserve of a card's memory, for arrays and temporary buffers. The rest is for what lies outside of its
pool: CUDA's context, the code of executables, NCCL. XLA's own default is 0.75 (GpuAllocatorConfig::memory_fraction,
xla/pjrt/plugin/xla_gpu/xla_gpu_allocator_config.h); vLLM's for a card is 0.9 too."""


def platform_of(devices: Sequence[Any]) -> Platform:
    """What such JAX devices are compiled for; JAX calls GPUs of every vendor "gpu"."""
    name = devices[0].platform
    return "cuda" if name == "gpu" else name


def jax_version() -> str:
    """The installed jax and jaxlib, without importing them; raises DeviceError with the install line."""
    try:
        return f"{metadata.version('jax')} {metadata.version('jaxlib')}"
    except metadata.PackageNotFoundError:
        raise DeviceError(f"jax is not installed; {how_to_install('jax', 'xla')}") from None


def toolchain_version(platform: str) -> str:
    """What native code for `platform` belongs to: jax, jaxlib and its compiler's package; raises DeviceError."""
    try:
        compiler = metadata.version(COMPILERS[platform]) if platform in COMPILERS else ""
    except metadata.PackageNotFoundError:
        compiler = ""
    return f"{jax_version()} {compiler}".strip()


def has_tpu() -> bool:
    """Whether this process could use a TPU: its library is installed, and the kernel shows a device of it."""
    return find_spec("libtpu") is not None and any(os.path.exists(p) for p in ("/dev/accel0", "/dev/vfio/0"))  # noqa: PTH110


def open_client(platform: Platform, devices: int = 1, threads: int | None = None) -> list[Any]:
    """The first `devices` JAX devices of `platform`, in an otherwise unconfigured process.

    On cpu, that many devices are made of the one host, and `threads` bounds what each computes with. Raises DeviceError
    when JAX is missing, or runs in this process with fewer devices already.
    """
    jax_version()
    if not has_tpu():
        for name, value in LIBTPU_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
    import jax
    from jax._src import lib

    jax.config.update("jax_traceback_in_locations_limit", 0)  # else executables hold this source's path and lines
    if platform == "cpu":
        lib.cuda_path = None  # else executables of every platform hold the path of the nvidia packages
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
    """Set an option of JAX's that counts only before its first computation; leave it where that is past."""
    from jax._src import xla_bridge

    if not xla_bridge.backends_are_initialized():
        jax.config.update(option, value)


COMPILED = "/jax/core/compile/backend_compile_duration"
"""JAX's name of the event."""

_lock = threading.Lock()
_listens = False
_here = threading.local()
_compiled: list[str] = []


@contextmanager
def reporting(report: Callable[[str], None] | None) -> Iterator[None]:
    """`report` is called for each compilation of JAX in this thread until the block ends; None: no calls."""
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
    """Whether every compilation of this process has been heard since JAX's first."""
    return _listens


class JaxMonitor(Monitor):
    """Sees each compilation of JAX in the process, in any thread, that is heard after `listen`."""

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
