"""Steps on a GPU that torch.compile compiles, and hosts on which a GPU cannot be used."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmc.errors import ArtifactError, DeviceError, OutOfDeviceMemoryError
from llmc.runtime.bundle import Bundle
from llmc.runtime.executors import open_executor
from llmc.runtime.executors.inductor.executor import InductorExecutor, InductorOnDevice
from llmc.runtime.step import pad
from llmc.settings import Settings
from llmc.testing.executors import PLAN, prefill
from tests.fakes import nvidia, pynvml
from tests.manifests import edit_manifest
from tests.runtime.executors.inductor.conftest import Host
from tests.tiers import full

Opened = Callable[..., InductorOnDevice]


@full
def test_what_is_compiled_gives_the_numbers_of_the_cpu_and_is_counted(
    bundle: Path, host: Host, on_device: Opened, compiled: list[Any]
) -> None:
    cpu = open_executor(Bundle.open(bundle), slots=2, threads=1)
    assert type(cpu) is InductorExecutor
    prompt, decode = PLAN.prompt[0], PLAN.decode[0]
    steps = [pad(prompt, [0], [[1, 2]], [0]), pad(decode, [0], [[3]], [2])]
    wanted = [cpu.run(step)[0].copy() for step in steps]
    cpu.close()
    host("torch.compile")
    executor = on_device()
    assert str(executor.mode) == "torch.compile"
    for step, want in zip(steps, wanted, strict=True):
        np.testing.assert_allclose(executor.run(step)[0], want, rtol=1e-5, atol=1e-5)
    assert len(compiled) == 2
    assert [name.split(" batch")[0] for name in executor.compilations.at_open] == [
        "torch.compile: prompt", "torch.compile: decode",
    ]  # fmt: skip
    executor.compilations.ready()
    executor.run(steps[1])
    assert executor.compilations.count == 0
    other = PLAN.prompt[1]
    executor.run(pad(other, [0], [[1]], [0]))
    assert f"torch.compile: {executor.bundle.executable('prompt', other.batch, other.query, other.context)}" in (
        executor.compilations.compiled
    ), "a shape that nothing warmed is named"


@pytest.mark.parametrize(("environment", "mode"), [
    ({}, "CUDA graphs"), ({"LLMC_CUDA_GRAPHS": "0"}, "torch.compile"),
    ({"LLMC_ENFORCE_EAGER": "1"}, "PyTorch eager mode"),
])  # fmt: skip
def test_the_mode_is_what_the_environment_says(environment: dict[str, str], mode: str) -> None:
    from llmc.runtime.executors.inductor.executor import InductorMode

    assert str(InductorMode.of(Settings.from_environment(environment))) == mode


def test_a_host_without_a_gpu_runs_on_the_cpu_and_says_so(bundle: Path) -> None:
    executor = open_executor(Bundle.open(bundle), slots=2, threads=1)
    assert executor.capabilities.in_place_of == "NVIDIA GPU"
    assert prefill(executor, 0, [1, 2]).any()
    executor.close()


def test_a_portable_half_is_opened_on_the_cpu_of_a_host_with_a_gpu(
    bundle: Path, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host()
    monkeypatch.setenv("LLMC_OPEN_PORTABLE", "1")
    executor = open_executor(Bundle.open(bundle), slots=2, threads=1)
    assert type(executor) is InductorExecutor
    executor.close()


def test_too_little_memory_is_named_before_anything_is_loaded(bundle: Path, host: Host) -> None:
    gpu = host(memory=100_000)
    with pytest.raises(OutOfDeviceMemoryError, match=r"of GPU 0 \(weights .*, the cache of one sequence .*\), .* more"):
        open_executor(Bundle.open(bundle), slots=2, threads=1)
    assert gpu.allocator.reserved == 0


def test_a_driver_that_is_too_old_for_this_torch_is_named(
    bundle: Path, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host()
    nvidia.install(monkeypatch, pynvml.Device(), driver="550.54.14", cuda=12040)
    with pytest.raises(DeviceError, match=r"CUDA 13; this host's driver 550\.54\.14 knows CUDA up to 12\.4"):
        open_executor(Bundle.open(bundle), slots=2, threads=1)


def test_a_torch_without_cuda_on_a_host_with_a_gpu_is_said(
    bundle: Path, host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    host()
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    executor = open_executor(Bundle.open(bundle), slots=2, threads=1)
    assert type(executor) is InductorExecutor
    assert "its torch was built without CUDA: install one with CUDA" in caplog.text
    executor.close()


def test_another_torch_than_the_bundles_is_a_warning_with_a_gpu_and_an_error_without(
    bundle: Path, host: Host, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = shutil.copytree(bundle, tmp_path / "other")
    edit_manifest(other, lambda document: document["toolchain"].update(torch="2.9.1"))
    with pytest.raises(ArtifactError, match=r"compiled with torch 2\.9\.1"):
        open_executor(Bundle.open(other), slots=2, threads=1)
    host()
    open_executor(Bundle.open(other), slots=2, threads=1).close()
    assert "compiled with torch 2.9.1, this host has" in caplog.text
