"""Hosts on which an accelerator cannot be used: what they say, and what runs on their CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from llmc.errors import ArtifactError, DeviceError, OutOfDeviceMemoryError
from llmc.runtime.bundle import Bundle
from llmc.runtime.executors import open_executor
from llmc.runtime.executors.hpu.executor import HpuExecutor, HpuOnDevice
from llmc.testing.executors import prefill
from tests.manifests import edit_manifest
from tests.runtime.executors.hpu.conftest import Host
from tests.tiers import full

Opened = Callable[..., HpuOnDevice]


@full
def test_an_sdk_without_a_accelerator_runs_on_the_cpu_and_says_so(bundle: Path, host: Host) -> None:
    host(FAKE_HPUS="0")
    executor = open_executor(Bundle.open(bundle), slots=2, threads=1)
    assert type(executor) is HpuExecutor
    assert executor.capabilities.in_place_of == "Gaudi"
    assert prefill(executor, 0, [1, 2]).any()
    executor.close()


def test_another_driver_is_named(bundle: Path, host: Host) -> None:
    host(FAKE_HPU_DRIVER="1.18.0")
    with pytest.raises(DeviceError, match=r"driver 1\.18\.0, SynapseAI 1\.24\.0.*hl-smi"):
        open_executor(Bundle.open(bundle), slots=2, threads=1)


def test_a_accelerator_that_does_not_hold_the_weights_says_how_much_is_free(bundle: Path, host: Host) -> None:
    host(FAKE_HPU_MEMORY="100000")
    with pytest.raises(OutOfDeviceMemoryError, match=r"Allocation failed.* of 100000 bytes are free"):
        open_executor(Bundle.open(bundle), slots=2, threads=1)


def test_a_process_keeps_the_mode_of_its_first_accelerator(
    bundle: Path, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host("PyTorch lazy mode")
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "0")
    with pytest.raises(DeviceError, match=r"uses Gaudi with PT_HPU_LAZY_MODE=1.*start another"):
        open_executor(Bundle.open(bundle), slots=2, threads=1)


def test_another_torch_than_the_bundles_is_a_warning_with_a_accelerator_and_an_error_without(
    bundle: Path, host: Host, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import shutil

    other = shutil.copytree(bundle, tmp_path / "other")
    edit_manifest(other, lambda document: document["toolchain"].update(torch="2.9.1"))
    with pytest.raises(ArtifactError, match=r"compiled with torch 2\.9\.1"):
        open_executor(Bundle.open(other), slots=2, threads=1)
    host()
    executor = open_executor(Bundle.open(other), slots=2, threads=1)
    assert "compiled with torch 2.9.1, this Gaudi host has" in caplog.text
    assert "llmc verify" in caplog.text
    executor.close()
