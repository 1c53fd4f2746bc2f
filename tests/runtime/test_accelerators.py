"""Cards that a host has, read from what the kernel shows of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.runtime.accelerators import (
    ACCELERATORS,
    CPU,
    GAUDI,
    INTEL_GPU,
    INTEL_NPU,
    NEURON,
    NVIDIA_GPU,
    TPU,
    Accelerator,
    cpu_name,
)


def host(root: Path, *accelerators: tuple[str, str, str], nodes: tuple[str, ...] = ()) -> Path:
    for i, accelerator in enumerate(accelerators):
        folder = root / "sys" / "bus" / "pci" / "devices" / f"0000:0{i}:00.0"
        folder.mkdir(parents=True)
        for name, value in zip(("vendor", "device", "class"), accelerator, strict=True):
            (folder / name).write_text(f"{value}\n")
    for node in nodes:
        path = root / "dev" / node
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return root


@pytest.mark.parametrize(
    ("accelerator", "identity", "node"),
    [
        (GAUDI, ("0x1da3", "0x1060", "0x120000"), "accel/accel0"),
        (TPU, ("0x1ae0", "0x0063", "0xff0000"), "vfio/0"),
        (INTEL_GPU, ("0x8086", "0x56c0", "0x038000"), "dri/renderD128"),
        (INTEL_NPU, ("0x8086", "0x643e", "0x120000"), "accel/accel0"),
        (NVIDIA_GPU, ("0x10de", "0x2330", "0x030200"), "nvidia0"),
    ],
)
def test_a_gpu_is_known_by_its_pci_identity_and_is_no_other(
    tmp_path: Path, accelerator: Accelerator, identity: tuple[str, str, str], node: str
) -> None:
    root = host(tmp_path, identity, identity, nodes=(node,))
    assert accelerator.found(root) == f"2 × {accelerator.name}"
    assert [other.name for other in ACCELERATORS if other.found(root)] == [accelerator.name]


def test_a_gpu_without_its_driver_says_so(tmp_path: Path) -> None:
    found = GAUDI.found(host(tmp_path, ("0x1da3", "0x1060", "0x120000")))
    assert found == "1 × Intel Gaudi, its driver not loaded (no /dev/accel/accel*)"


def test_neuron_devices_are_counted_by_their_nodes(tmp_path: Path) -> None:
    assert NEURON.found(host(tmp_path, nodes=("neuron0", "neuron1", "neuronx"))) == "2 × AWS Neuron device"


def test_other_gpus_of_a_vendor_are_none(tmp_path: Path) -> None:
    root = host(tmp_path, ("0x8086", "0x1533", "0x020000"), ("0x1ae0", "0x0042", "0x020000"))  # network cards
    assert not any(accelerator.found(root) for accelerator in ACCELERATORS)


def test_a_host_that_shows_nothing_has_nothing(tmp_path: Path) -> None:
    assert not any(accelerator.found(tmp_path) for accelerator in ACCELERATORS)
    assert cpu_name(tmp_path) == ""


def test_a_gpu_that_vanishes_while_it_is_read_is_passed_over(tmp_path: Path) -> None:
    root = host(tmp_path, ("0x1da3", "0x1060", "0x120000"))
    next(root.rglob("vendor")).unlink()
    assert GAUDI.found(root) == ""


def test_the_cpu_has_a_name_and_what_kernels_are_chosen_by(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "cpuinfo").write_text("processor\t: 0\nmodel name\t: A CPU\n")
    assert CPU.found(tmp_path).startswith("A CPU")
