"""What a host has of the platforms that XLA compiles for: which of them opens a bundle here, and what it needs."""

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
"""What a bundle's memory is for, in words, and its name in the manifest."""


class PlatformHost(ABC):
    """A platform as this process finds it. One object stands for it in the whole process."""

    platform: ClassVar[Platform]
    """XLA's name of it."""
    device: ClassVar[str]
    """What a host has where it has it, in words: "TPU"."""

    @abstractmethod
    def here(self) -> bool:
        """Whether this process can use such a device. Imports no JAX. Raises DeviceError where there is one that
        cannot be used."""

    @abstractmethod
    def require(self, bundle: Bundle) -> None:
        """Refuse a bundle that the devices here cannot run, before anything is loaded. Called where it is here.

        Raises DeviceError, ArtifactError or OutOfDeviceMemoryError that says what differs.
        """

    def open(self, devices: int, threads: int) -> list[Any]:
        """The first `devices` JAX devices of it, see `open_client`. Raises DeviceError."""
        return open_client(self.platform, devices, threads)

    def load(self, native: bytes, devices: Sequence[Any]) -> Any:
        """An executable of this platform from PJRT's serialisation; raises what XLA raises."""
        from jaxlib import _jax

        return devices[0].client.deserialize_executable(native, _jax.DeviceList(tuple(devices)))


class CpuHost(PlatformHost):
    """This host's CPU, which runs every bundle: its own natively, others from their portable programs."""

    platform: ClassVar[Platform] = "cpu"
    device: ClassVar[str] = "CPU"

    def here(self) -> bool:
        return True

    def require(self, bundle: Bundle) -> None:
        """Refuse native code for instructions that this CPU lacks."""
        from llmc.runtime.host import host_features

        built = bundle.manifest.toolchain
        missing = sorted(set(bundle.manifest.isa) - set(host_features()))
        if missing and jax_version() == f"{built.get('jax')} {built.get('jaxlib')}":
            raise DeviceError(
                f"{bundle.path}: compiled for a CPU with {', '.join(missing)}, which this one lacks; compile it here: "
                f"{bundle.recompile_hint}"
            )


class TpuHost(PlatformHost):
    """A TPU host. What a bundle asks of a TPU is checked by libtpu, when it opens the executables."""

    platform: ClassVar[Platform] = "tpu"
    device: ClassVar[str] = "TPU"

    def here(self) -> bool:
        return has_tpu()

    def require(self, bundle: Bundle) -> None:
        """Nothing beside libtpu's own checks."""


class CudaHost(PlatformHost):
    """A host with NVIDIA cards: what a bundle asks of them, and XLA's client of them, set up before JAX starts.

    What is checked before anything is loaded, and why:

        compute capability   equal: XLA refuses any other when it reads an executable (GpuExecutable::FromProto,
                             xla/service/gpu/gpu_executable.cc of b7d5c51), and machine code for 9.0a or 10.0a runs on
                             no other card
        driver               of the CUDA major version whose ptxas made the machine code (runtime/nvidia.py)
        free memory          weights, cache, temporary memory and code, against what XLA may take: its share of the
                             card (XLA_CLIENT_MEM_FRACTION, here CUDA_MEMORY_FRACTION unless it is set), or what is
                             free of it. Where XLA runs in this process already, its pool is asked: the driver calls
                             all of it taken

    Another version of jax, jaxlib or jax-cuda13-pjrt is no error: portable programs are compiled on the card
    (programs.py).

    JAX: `initialize()` of the plug-in is JAX's to call, once a process; a second call raises ALREADY_EXISTS. It loads
    CUDA's libraries, which llmc's extra leaves out, and a missing one becomes a message that JAX logs
    (jax_plugins/xla_cuda13/__init__.py, _check_cuda_versions, 0.10.2). The client takes every card that it may see, and
    memory on each; `jax_cuda_visible_devices` bounds that (jax/_src/xla_bridge.py, 0.10.2).
    """

    platform: ClassVar[Platform] = "cuda"
    device: ClassVar[str] = "NVIDIA card"

    def here(self) -> bool:
        """A card that the driver answers for; raises DeviceError where JAX lacks its plug-in for it."""
        if not gpus():
            return False
        if find_spec(PLUGIN) is None:
            raise DeviceError(
                f"this host has an NVIDIA card, and jax has no plug-in for it; {_install()}, or open bundles on the "
                "CPU with LLMC_OPEN_PORTABLE=1"
            )
        return True

    def require(self, bundle: Bundle) -> None:
        """Refuse other cards than the bundle's, fewer, an older driver, and too little memory."""
        fraction = xla_memory_fraction() or CUDA_MEMORY_FRACTION
        pools = self._pools()
        cards = [
            replace(gpu, free=pools[gpu.index] if gpu.index in pools else min(gpu.free, int(gpu.total * fraction)))
            for gpu in gpus()
        ]
        require_gpu(str(bundle.path), needs_of(bundle), cards)

    def open(self, devices: int, threads: int) -> list[Any]:
        """The first cards. Memory is reserved on these alone, as much as CUDA_MEMORY_FRACTION or the user says."""
        if xla_memory_fraction() is None:
            os.environ[_FRACTION] = str(CUDA_MEMORY_FRACTION)  # jaxlib/xla_client.py reads it when JAX starts
        import jax

        before_start(jax, "jax_platforms", "cuda,cpu")
        before_start(jax, "jax_cuda_visible_devices", ",".join(map(str, range(devices))))
        try:
            return super().open(devices, threads)
        except RuntimeError as e:
            raise DeviceError(
                f"JAX cannot open the NVIDIA card: {' '.join(str(e).split())[:500]}; {_install()}, which brings CUDA's "
                "libraries, and see what nvidia-smi says"
            ) from e

    def _pools(self) -> Mapping[int, int]:
        """Bytes that are free in XLA's pool of each card, where it runs in this process already."""
        if "jax" not in sys.modules:
            return {}
        import jax
        from jax._src import xla_bridge

        if not xla_bridge.backends_are_initialized() or "cuda" not in xla_bridge.backends():
            return {}
        stats = {device.id: device.memory_stats() or {} for device in jax.local_devices(backend="cuda")}
        return {card: s["bytes_limit"] - s["bytes_in_use"] for card, s in stats.items() if "bytes_limit" in s}


def needs_of(bundle: Bundle) -> Needs:
    """What the manifest says that a card must be and hold; raises ArtifactError where it says nothing of it."""
    manifest = bundle.manifest
    try:
        analysis: Any = manifest.options["analysis"]
        card, memory = analysis["card"], analysis["device_memory"]
        major, minor = re.fullmatch(r"(\d{1,3})\.(\d{1,3})", card["compute_capability"]).groups()  # type: ignore[union-attr]
        sizes = {words: memory[name] for words, name in _PARTS.items()}
        cuda = int(manifest.toolchain["nvidia-cuda-nvcc"].partition(".")[0])
        product = card["product"]
    except (KeyError, TypeError, AttributeError, ValueError) as e:
        raise _unsaid(bundle) from e
    if not isinstance(product, str) or not all(type(size) is int and size >= 0 for size in sizes.values()):
        raise _unsaid(bundle)
    return Needs(bundle.option("tensor_parallel", 1), (int(major), int(minor)), cuda, sizes, product)


def cards_here() -> Mapping[str, str]:
    """What certificates say of the cards of this host and their driver, without opening them; empty for none."""
    cards = gpus()
    if not cards:
        return {}
    return {
        "card": ", ".join(sorted({gpu.name for gpu in cards})),
        "compute capability": ", ".join(sorted({"{}.{}".format(*gpu.compute_capability) for gpu in cards})),
        "driver": cards[0].driver,
    }


def _unsaid(bundle: Bundle) -> ArtifactError:
    return ArtifactError(
        f"{bundle.path}: its manifest does not say for which card it is and what it needs of its memory; compile it "
        f"again: {bundle.recompile_hint}"
    )


def _install() -> str:
    return f"install it with pip install 'jax[cuda13]=={metadata.version('jax')}'"


HOSTS: Mapping[str, PlatformHost] = MappingProxyType(
    {host.platform: host for host in (CpuHost(), TpuHost(), CudaHost())}
)
"""By XLA's name of the platform."""


def platform_of_bundle(bundle: Bundle) -> str:
    """What its executables are for, which its target is named after; the CPU for XLA's target of that name."""
    return bundle.manifest.target if bundle.manifest.target in HOSTS else "cpu"


def host_for(bundle: Bundle) -> PlatformHost:
    """The platform that opens the bundle in this process: its own where the host has it, else the CPU, which computes
    from its portable programs. LLMC_OPEN_PORTABLE asks for the CPU. Raises DeviceError for a device that is there and
    cannot be used."""
    wanted = HOSTS[platform_of_bundle(bundle)]
    return HOSTS["cpu"] if bundle.settings.open_portable or not wanted.here() else wanted


def in_place_of(bundle: Bundle, host: PlatformHost) -> str:
    """The device that the bundle is for, where `host` is another platform and runs it instead; else ""."""
    platform = platform_of_bundle(bundle)
    return "" if platform == host.platform else HOSTS[platform].device
