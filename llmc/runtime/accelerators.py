"""Accelerators of this host, found in /sys and /dev within a millisecond and without vendor libraries.

Sources of the PCI identifiers: jax/_src/hardware_utils.py (jax 0.10.2) for Google TPUs, openvino's
src/plugins/intel_npu/README.md of 08d1b43 for Intel NPUs, the kernel's drivers/accel/habanalabs for Habana, and pci.ids
for the other vendors and the classes (03: display, 12: accelerator). Neuron's driver creates one node for each device,
/dev/neuron0 and so on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from llmc.runtime.host import cpu_features
from llmc.settings import CPU_ISA, cpu_isa

ROOT = Path("/")


@dataclass(frozen=True)
class Accelerator:
    """A kind of accelerator and how to recognise it.

    `vendor` is its PCI vendor. `devices` lists PCI device identifiers (empty: all of the vendor's), `classes` the first
    digits of PCI classes, `nodes` the files below /dev that its driver creates.
    """

    name: str
    nodes: tuple[str, ...]
    vendor: str = ""
    devices: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()

    def found(self, root: Path | None = None) -> str:
        """Describe the accelerators of this kind on the host, or "". /sys and /dev are read below `root`."""
        root = root or ROOT
        nodes = sum(1 for pattern in self.nodes for _ in (root / "dev").glob(pattern))
        if not self.vendor:
            return f"{nodes} × {self.name}" if nodes else ""
        accelerators = sum(map(self._is, _pci(root)))
        if not accelerators:
            return ""
        unloaded = "" if nodes else f", its driver not loaded (no /dev/{self.nodes[0].partition('[')[0]}*)"
        return f"{accelerators} × {self.name}{unloaded}"

    def _is(self, identity: tuple[str, str, str]) -> bool:
        vendor, device, kind = identity
        if vendor != self.vendor or (self.devices and device not in self.devices):
            return False
        return not self.classes or kind.startswith(self.classes)


class ThisCpu:
    """The CPU that this process runs on."""

    name = "CPU"

    def found(self, root: Path | None = None) -> str:
        """Describe the CPU: its name if known, the instruction sets that select kernels, and LLMC_CPU_ISA's limit."""
        limit = f"(limited by {CPU_ISA}={cpu_isa()})" if cpu_isa() else ""
        return " ".join([cpu_name(root or ROOT), *cpu_features()[1:], limit]).strip()


class AcceleratorKind(Protocol):
    """Accelerators of one kind that a host may have."""

    @property
    def name(self) -> str:
        """Name of this kind, for people."""

    def found(self, root: Path | None = None) -> str:
        """Describe those on the host; "" if there are none. /sys and /dev are read below `root`."""


CPU = ThisCpu()
GAUDI = Accelerator("Intel Gaudi", ("accel/accel[0-9]*", "hl[0-9]*"), "0x1da3")
NEURON = Accelerator("AWS Neuron device", ("neuron[0-9]*",))
TPU = Accelerator(
    "TPU chip", ("accel[0-9]*", "vfio/[0-9]*"), "0x1ae0",
    ("0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"),
)  # fmt: skip
INTEL_GPU = Accelerator("Intel GPU", ("dri/renderD*", "dxg"), "0x8086", classes=("0x03",))
INTEL_NPU = Accelerator(
    "Intel NPU", ("accel/accel[0-9]*",), "0x8086", ("0x7d1d", "0xad1d", "0x643e", "0xb03e", "0xfd3e")
)
NVIDIA_GPU = Accelerator("NVIDIA GPU", ("nvidia[0-9]*", "dxg"), "0x10de", classes=("0x03",))
AMD_GPU = Accelerator("AMD GPU", ("kfd",), "0x1002", classes=("0x03", "0x12"))
ACCELERATORS = (GAUDI, NEURON, TPU, INTEL_GPU, INTEL_NPU, NVIDIA_GPU, AMD_GPU)


def cpu_name(root: Path | None = None) -> str:
    """Name of the CPU as the system reports it, or ""."""
    try:
        lines = ((root or ROOT) / "proc" / "cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _pci(root: Path) -> Iterator[tuple[str, str, str]]:
    """Yield (vendor, device, class) of every PCI device, as in "0x8086"."""
    for folder in (root / "sys" / "bus" / "pci" / "devices").glob("*"):
        try:
            vendor, device, kind = ((folder / name).read_text().strip() for name in ("vendor", "device", "class"))
        except OSError:
            continue
        yield vendor, device, kind
