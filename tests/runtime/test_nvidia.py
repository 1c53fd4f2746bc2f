"""NVIDIA GPUs of a host, and what is checked of them before a bundle is loaded: contract-tested on a fake NVML."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from llmc.errors import ArtifactError, DeviceError, LlmcError, OutOfDeviceMemoryError
from llmc.runtime import accelerators
from llmc.runtime.nvidia import Gpu, Needs, NvidiaGpus, gpus, require_gpu
from tests.fakes import pynvml
from tests.fakes.nvidia import H100, H100_OTHER, L40S, install

GIB = 1 << 30
ON_H100 = Needs(1, (9, 0), 13, {"weights": 60 * GIB, "cache": 10 * GIB}, "NVIDIA H100")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(accelerators, "ROOT", tmp_path)
    install(monkeypatch, fails=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)


def test_a_gpu_is_reported_with_what_bundles_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, H100, L40S, driver="590.44.01", cuda=13010)
    first, second = gpus()
    assert first == Gpu(0, "NVIDIA H100 80GB HBM3", (9, 0), 80 * GIB, 79 * GIB, "590.44.01", (13, 1))
    assert str(second) == "NVIDIA L40S (compute capability 8.9, 48 GiB)"
    assert pynvml.open_count() == 0


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED])
def test_a_host_without_a_driver_has_no_gpus(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    install(monkeypatch, fails=code)
    assert gpus() == ()


def test_this_module_reads_the_real_library_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pynvml")
    real = pytest.importorskip("pynvml")
    try:
        real.nvmlInit()
    except real.NVMLError:
        assert gpus() == ()
    else:
        assert len(gpus()) == real.nvmlDeviceGetCount()


def test_a_driver_that_does_not_answer_is_an_error_in_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, H100, fails=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
    with pytest.raises(DeviceError, match=r"RM has detected an NVML/RM version mismatch.*nvidia-smi"):
        gpus()
    install(monkeypatch, H100, pynvml.Device(lost=True))
    with pytest.raises(DeviceError, match="GPU is lost"):
        gpus()
    assert pynvml.open_count() == 0


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("1,0", ["NVIDIA L40S", "NVIDIA H100 80GB HBM3"]),
        ("GPU-3333", ["NVIDIA L40S"]),
        ("2", ["NVIDIA A100 MIG 1g"]),
        ("MIG-4444", ["NVIDIA A100 MIG 1g"]),
        ("", []),
        ("-1", []),
        ("1,7,0", ["NVIDIA L40S"]),
        ("GPU-", []),
        ("0,0", []),
        ("MIG-none", []),
    ],
)
def test_gpus_are_those_that_cuda_shows(monkeypatch: pytest.MonkeyPatch, visible: str, names: list[str]) -> None:
    install(monkeypatch, H100, L40S, pynvml.Device("NVIDIA A100 MIG 1g", "MIG-4444", (8, 0), 10 * GIB))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.name for gpu in gpus()] == names
    assert [gpu.index for gpu in gpus()] == list(range(len(names)))


def test_gpus_are_listed_as_the_driver_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert NvidiaGpus().found() == ""
    install(monkeypatch, H100, H100_OTHER, L40S)
    assert NvidiaGpus().found() == (
        "2 × NVIDIA H100 80GB HBM3 (compute capability 9.0, 80 GiB), 1 × NVIDIA L40S (compute capability 8.9, 48 GiB)"
    )
    install(monkeypatch, H100, fails=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
    assert NvidiaGpus().found().startswith("NVIDIA GPU (the NVIDIA driver does not answer: RM has detected")


def test_a_bundle_gets_the_first_gpus_that_can_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, H100, H100_OTHER, L40S)
    assert [gpu.index for gpu in require_gpu("bundle", Needs(2, (9, 0), 13))] == [0, 1]


def test_no_gpu_is_an_error_that_says_what_the_host_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"^bundle: needs an NVIDIA GPU; .*the host has no NVIDIA GPU$"):
        require_gpu("bundle", ON_H100)
    pci = tmp_path / "sys" / "bus" / "pci" / "devices" / "0000:01:00.0"
    pci.mkdir(parents=True)
    for name, value in {"vendor": "0x10de", "device": "0x2330", "class": "0x030200"}.items():
        (pci / name).write_text(value)
    with pytest.raises(DeviceError, match="the host has 1 × NVIDIA GPU, its driver not loaded"):
        require_gpu("bundle", ON_H100)
    install(monkeypatch, H100)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(DeviceError, match=r"\(CUDA_VISIBLE_DEVICES=\)"):
        require_gpu("bundle", ON_H100)


def test_without_its_library_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(DeviceError, match="pip install nvidia-ml-py"):
        require_gpu("bundle", ON_H100)


GONE = pynvml.Device(used=20 * GIB)


@pytest.mark.parametrize(
    ("found", "host", "needs", "error", "words"),
    [
        ([H100], {}, Needs(2), DeviceError, r"needs 2 NVIDIA GPUs, this process has 1"),
        (
            [L40S], {}, ON_H100, ArtifactError,
            r"compiled for NVIDIA H100, compute capability 9\.0; GPU 0 is NVIDIA L40S \(compute capability 8\.9",
        ),
        ([H100, L40S], {}, Needs(2, (9, 0)), ArtifactError, r"GPU 1 is NVIDIA L40S"),
        (
            [H100], {"driver": "570.86.10", "cuda": 12080}, ON_H100, DeviceError,
            r"compiled for CUDA 13; this host's driver 570\.86\.10 knows CUDA up to 12\.8; install driver 580 or newer",
        ),
        (
            [GONE], {}, ON_H100, OutOfDeviceMemoryError,
            r"needs 70 GiB of GPU 0 \(weights 60 GiB, cache 10 GiB\), 10 GiB more than is free: 60 GiB of NVIDIA H100",
        ),
    ],
)  # fmt: skip
def test_what_cannot_run_is_named_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, found: list[pynvml.Device], host: dict[str, object], needs: Needs,
    error: type[LlmcError], words: str,
) -> None:  # fmt: skip
    install(monkeypatch, *found, **host)
    with pytest.raises(error, match=words) as raised:
        require_gpu("bundle", needs)
    assert str(raised.value).startswith("bundle: ")


def test_a_newer_driver_and_a_full_but_wide_enough_gpu_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, pynvml.Device(used=10 * GIB), driver="600.10", cuda=14000)
    assert require_gpu("bundle", ON_H100)[0].free == 70 * GIB
