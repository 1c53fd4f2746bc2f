"""What a package is tied to on a host, by a fake of its driver (tests/fakes/pynvml.py)."""

from __future__ import annotations

import pytest

from llmc.runtime.executors.inductor import toolchain
from tests.fakes import nvidia
from tests.fakes.pynvml import NVML_ERROR_LIB_RM_VERSION_MISMATCH


@pytest.mark.parametrize(
    ("version", "known"),
    [("2.10.2", 0), ("2.11.0", 1), ("2.12.1", 1), ("2.13.0", 1), ("2.14.0", 0), ("3.0.0", 0), ("", 0)],
)
def test_torch_from_2_11_to_2_13(version: str, known: int) -> None:
    assert toolchain.is_known(version) == bool(known)


def test_a_host_is_its_first_gpu_and_the_software_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "torch_cuda", lambda: "13.0")
    nvidia.install(monkeypatch, nvidia.L40S, nvidia.H100)
    assert toolchain.host() == {
        "gpu": "NVIDIA L40S", "compute_capability": "8.9", "driver": "580.95.05", "cuda": "13.0",
        "torch": toolchain.torch_version(),
    }  # fmt: skip


def test_no_gpu_no_driver_or_a_torch_for_cpus_is_no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia.install(monkeypatch, nvidia.H100)
    monkeypatch.setattr(toolchain, "torch_cuda", lambda: "")
    assert toolchain.host() == {}
    monkeypatch.setattr(toolchain, "torch_cuda", lambda: "13.0")
    nvidia.install(monkeypatch)
    assert toolchain.host() == {}
    nvidia.install(monkeypatch, nvidia.H100, fails=NVML_ERROR_LIB_RM_VERSION_MISMATCH)
    assert toolchain.host() == {}


@pytest.mark.parametrize(
    ("line", "cuda"),
    [
        ("cuda: Optional[str] = '13.0'", "13.0"), ("cuda: str | None = \"12.8\"", "12.8"), ("cuda = '13.0'", "13.0"),
        ("cuda: Optional[str] = None", ""), ("hip: Optional[str] = '7.0'", ""),
    ],
)  # fmt: skip
def test_torchs_cuda_is_read_from_its_version_file(line: str, cuda: str) -> None:
    assert toolchain.cuda_in(f"__version__ = '2.13.0'\ndebug = False\n{line}\n") == cuda
