"""Which cards a host has: read from /sys and /dev, in a millisecond, without a vendor's library.

Vendors and devices are PCI identifiers: Google's and its TPUs' from jax/_src/hardware_utils.py (jax 0.10.2), Intel's
NPUs' from openvino's src/plugins/intel_npu/README.md of 08d1b43, Habana's from the kernel's drivers/accel/habanalabs,
the other vendors' and the classes (03: display, 12: accelerator) from pci.ids. Neuron's driver makes /dev/neuron0 and
so on, a node a device.
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
    """A sort of card: its `name`, PCI `vendor`, `devices` (none: all of the vendor's) or first digits of its class
    (`classes`), and the `nodes` below /dev that its driver makes."""

    name: str
    nodes: tuple[str, ...]
    vendor: str = ""
    devices: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()

    def found(self, root: Path | None = None) -> str:
        """What the host has of it, in words; "" for nothing. `root` is where /sys and /dev lie."""
        root = root or ROOT
        nodes = sum(1 for pattern in self.nodes for _ in (root / "dev").glob(pattern))
        if not self.vendor:
            return f"{nodes} × {self.name}" if nodes else ""
        cards = sum(map(self._is, _pci(root)))
        if not cards:
            return ""
        unloaded = "" if nodes else f", its driver not loaded (no /dev/{self.nodes[0].partition('[')[0]}*)"
        return f"{cards} × {self.name}{unloaded}"

    def _is(self, identity: tuple[str, str, str]) -> bool:
        vendor, device, kind = identity
        if vendor != self.vendor or (self.devices and device not in self.devices):
            return False
        return not self.classes or kind.startswith(self.classes)


class ThisCpu:
    """The CPU that this process runs on."""

    name = "CPU"

    def found(self, root: Path | None = None) -> str:
        """Its name if the system reports it, the instruction sets that kernels are chosen by, and their limit."""
        limit = f"(limited by {CPU_ISA}={cpu_isa()})" if cpu_isa() else ""
        return " ".join([cpu_name(root or ROOT), *cpu_features()[1:], limit]).strip()


class Cards(Protocol):
    """Cards of one sort that a host may have."""

    @property
    def name(self) -> str:
        """What they are, in words."""

    def found(self, root: Path | None = None) -> str:
        """What the host has of it, in words; "" for nothing. `root` is where /sys and /dev lie."""


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
CARDS = (GAUDI, NEURON, TPU, INTEL_GPU, INTEL_NPU, NVIDIA_GPU, AMD_GPU)


def cpu_name(root: Path | None = None) -> str:
    """As the system names it; "" where it does not."""
    try:
        lines = ((root or ROOT) / "proc" / "cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _pci(root: Path) -> Iterator[tuple[str, str, str]]:
    """(vendor, device, class) of every PCI device, as in "0x8086"."""
    for folder in (root / "sys" / "bus" / "pci" / "devices").glob("*"):
        try:
            vendor, device, kind = ((folder / name).read_text().strip() for name in ("vendor", "device", "class"))
        except OSError:
            continue
        yield vendor, device, kind
