"""This host's XLA platforms: which of them opens a bundle here, and what it needs."""

from __future__ import annotations

import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from llmc.errors import ArtifactError, DeviceError
from llmc.runtime.executors.xla.client import (
    CUDA_MEMORY_FRACTION,
    Platform,
    before_start,
    has_tpu,
    jax_version,
    open_client,
)
from llmc.runtime.nvidia import Needs, gpus, require_gpu
from llmc.settings import xla_memory_fraction

if TYPE_CHECKING:
    from llmc.runtime.bundle import Bundle

PLUGIN = "jax_cuda13_plugin"
_FRACTION = "XLA_CLIENT_MEM_FRACTION"
_PARTS = {"weights": "weights", "cache": "cache", "temporary memory": "temporary", "code": "code"}
"""Purposes of a bundle's memory in words, and their manifest names."""


class PlatformHost(ABC):
    """A platform as this process finds it; one object per platform in the process."""

    platform: ClassVar[Platform]
    """XLA's name of the platform."""
    device: ClassVar[str]
    """Name of its devices: "TPU"."""

    @abstractmethod
    def here(self) -> bool:
        """Whether this process can use such a device, without JAX. Raises DeviceError if it is there and cannot be
        used.
        """

    @abstractmethod
    def require(self, bundle: Bundle) -> None:
        """Check, before anything is loaded, that the devices here can run the bundle. Called only if `here`.

        Raises DeviceError, ArtifactError or OutOfDeviceMemoryError naming the difference.
        """

    def open(self, devices: int, threads: int) -> list[Any]:
        return open_client(self.platform, devices, threads)

    def load(self, native: bytes, devices: Sequence[Any]) -> Any:
        """Load an executable of this platform from PJRT's serialisation; raises XLA's errors."""
        from jaxlib import _jax

        return devices[0].client.deserialize_executable(native, _jax.DeviceList(tuple(devices)))


class CpuHost(PlatformHost):
    """This host's CPU. It runs every bundle: its own natively, others from their portable programs."""

    platform: ClassVar[Platform] = "cpu"
    device: ClassVar[str] = "CPU"

    def here(self) -> bool:
        return True

    def require(self, bundle: Bundle) -> None:
        from llmc.runtime.host import host_features

        built = bundle.manifest.toolchain
        missing = sorted(set(bundle.manifest.isa) - set(host_features()))
        if missing and jax_version() == f"{built.get('jax')} {built.get('jaxlib')}":
            raise DeviceError(
                f"{bundle.path}: compiled for a CPU with {', '.join(missing)}, which this one lacks; compile it here: "
                f"{bundle.recompile_hint}"
            )


class TpuHost(PlatformHost):
    """A TPU host. libtpu checks a bundle's requirements when it opens the executables."""

    platform: ClassVar[Platform] = "tpu"
    device: ClassVar[str] = "TPU"

    def here(self) -> bool:
        return has_tpu()

    def require(self, bundle: Bundle) -> None: ...


class CudaHost(PlatformHost):
    """A host with NVIDIA GPUs: checks a bundle's requirements, and configures XLA's client before JAX starts.

    Checked before anything is loaded:

        compute capability   equal: XLA rejects any other when it reads an executable (GpuExecutable::FromProto,
                             xla/service/gpu/gpu_executable.cc of b7d5c51), and machine code for 9.0a or 10.0a runs on
                             no other GPU
        driver               of the CUDA major version whose ptxas produced the machine code (runtime/nvidia.py)
        free memory          weights, cache, temporary memory and code, against what XLA may take: its fraction of the
                             GPU (XLA_CLIENT_MEM_FRACTION, here CUDA_MEMORY_FRACTION unless set), or the GPU's free
                             memory. If XLA already runs in this process, its pool's free memory counts, because the
                             driver reports the whole pool as used

    Another version of jax, jaxlib or jax-cuda13-pjrt is no error: portable programs are compiled on the GPU
    (programs.py).

    JAX calls the plug-in's `initialize()` once per process; a second call raises ALREADY_EXISTS. It loads CUDA's
    libraries, which llmc's extra leaves out, and a missing one becomes a message that JAX logs
    (jax_plugins/xla_cuda13/__init__.py, _check_cuda_versions, 0.10.2). The client takes every visible GPU and reserves
    memory on each; `jax_cuda_visible_devices` limits that (jax/_src/xla_bridge.py, 0.10.2).
    """

    platform: ClassVar[Platform] = "cuda"
    device: ClassVar[str] = "NVIDIA GPU"

    def here(self) -> bool:
        if not gpus():
            return False
        if find_spec(PLUGIN) is None:
            raise DeviceError(
                f"this host has an NVIDIA GPU, but jax has no plug-in for it; {_install()}, or open bundles on the "
                "CPU with LLMC_OPEN_PORTABLE=1"
            )
        return True

    def require(self, bundle: Bundle) -> None:
        fraction = xla_memory_fraction() or CUDA_MEMORY_FRACTION
        pools = self._pools()
        available = [
            replace(gpu, free=pools[gpu.index] if gpu.index in pools else min(gpu.free, int(gpu.total * fraction)))
            for gpu in gpus()
        ]
        require_gpu(str(bundle.path), needs_of(bundle), available)

    def open(self, devices: int, threads: int) -> list[Any]:
        """The first GPUs. Memory is reserved only on these, by CUDA_MEMORY_FRACTION or the user's setting."""
        if xla_memory_fraction() is None:
            os.environ[_FRACTION] = str(CUDA_MEMORY_FRACTION)  # jaxlib/xla_client.py reads it when JAX starts
        import jax

        before_start(jax, "jax_platforms", "cuda,cpu")
        before_start(jax, "jax_cuda_visible_devices", ",".join(map(str, range(devices))))
        try:
            return super().open(devices, threads)
        except RuntimeError as e:
            raise DeviceError(
                f"JAX cannot open the NVIDIA GPU: {' '.join(str(e).split())[:500]}; {_install()}, which brings CUDA's "
                "libraries, and see what nvidia-smi says"
            ) from e

    def _pools(self) -> Mapping[int, int]:
        """Free bytes in XLA's pool of each GPU, if it already runs in this process."""
        if "jax" not in sys.modules:
            return {}
        import jax
        from jax._src import xla_bridge

        if not xla_bridge.backends_are_initialized() or "cuda" not in xla_bridge.backends():
            return {}
        stats = {device.id: device.memory_stats() or {} for device in jax.local_devices(backend="cuda")}
        return {gpu: s["bytes_limit"] - s["bytes_in_use"] for gpu, s in stats.items() if "bytes_limit" in s}


def needs_of(bundle: Bundle) -> Needs:
    """The manifest's GPU requirements; raises ArtifactError if it has none."""
    manifest = bundle.manifest
    try:
        analysis: Any = manifest.options["analysis"]
        gpu, memory = analysis["gpu"], analysis["device_memory"]
        major, minor = re.fullmatch(r"(\d{1,3})\.(\d{1,3})", gpu["compute_capability"]).groups()  # type: ignore[union-attr]
        sizes = {words: memory[name] for words, name in _PARTS.items()}
        cuda = int(manifest.toolchain["nvidia-cuda-nvcc"].partition(".")[0])
        product = gpu["product"]
    except (KeyError, TypeError, AttributeError, ValueError) as e:
        raise _unsaid(bundle) from e
    if not isinstance(product, str) or not all(type(size) is int and size >= 0 for size in sizes.values()):
        raise _unsaid(bundle)
    return Needs(bundle.option("tensor_parallel", 1), (int(major), int(minor)), cuda, sizes, product)


def gpus_here() -> Mapping[str, str]:
    """Certificate facts about this host's GPUs and driver, without opening them; empty without a GPU."""
    found = gpus()
    if not found:
        return {}
    return {
        "gpu": ", ".join(sorted({gpu.name for gpu in found})),
        "compute capability": ", ".join(sorted({"{}.{}".format(*gpu.compute_capability) for gpu in found})),
        "driver": found[0].driver,
    }


def _unsaid(bundle: Bundle) -> ArtifactError:
    return ArtifactError(
        f"{bundle.path}: its manifest does not name its GPU and the GPU memory it needs; compile it "
        f"again: {bundle.recompile_hint}"
    )


def _install() -> str:
    return f"install it with pip install 'jax[cuda13]=={metadata.version('jax')}'"


HOSTS: Mapping[str, PlatformHost] = MappingProxyType(
    {host.platform: host for host in (CpuHost(), TpuHost(), CudaHost())}
)
"""By XLA's platform name."""


def platform_of_bundle(bundle: Bundle) -> str:
    """The platform of the bundle's executables, which names its target; the CPU for XLA's target of that name."""
    return bundle.manifest.target if bundle.manifest.target in HOSTS else "cpu"


def host_for(bundle: Bundle) -> PlatformHost:
    """The platform that opens the bundle in this process: its own if it is here and not refused, otherwise the CPU.

    The CPU runs its portable programs. Raises DeviceError for a device that is present but cannot be used.
    """
    wanted = HOSTS[platform_of_bundle(bundle)]
    return HOSTS["cpu"] if bundle.settings.open_portable or not wanted.here() else wanted


def in_place_of(bundle: Bundle, host: PlatformHost) -> str:
    """The bundle's device, if `host` is another platform and runs the bundle instead; otherwise ""."""
    platform = platform_of_bundle(bundle)
    return "" if platform == host.platform else HOSTS[platform].device
