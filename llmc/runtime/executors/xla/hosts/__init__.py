"""What a host has of the platforms that XLA compiles for: which of them opens a bundle here, and what it needs."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from llmc.runtime.executors.xla.hosts.base import Host
from llmc.runtime.executors.xla.hosts.cpu import CpuHost
from llmc.runtime.executors.xla.hosts.cuda import CudaHost
from llmc.runtime.executors.xla.hosts.tpu import TpuHost

if TYPE_CHECKING:
    from llmc.runtime.bundle import Bundle

HOSTS: Mapping[str, Host] = MappingProxyType({host.platform: host for host in (CpuHost(), TpuHost(), CudaHost())})
"""By XLA's name of the platform."""


def platform_of_bundle(bundle: Bundle) -> str:
    """What its executables are for, which its target is named after; the CPU for XLA's target of that name."""
    return bundle.manifest.target if bundle.manifest.target in HOSTS else "cpu"


def host_for(bundle: Bundle) -> Host:
    """The platform that opens the bundle in this process: its own where the host has it, else the CPU, which computes
    from its portable programs. LLMC_OPEN_PORTABLE asks for the CPU. Raises DeviceError for a device that is there and
    cannot be used."""
    wanted = HOSTS[platform_of_bundle(bundle)]
    return HOSTS["cpu"] if bundle.settings.open_portable or not wanted.here() else wanted
