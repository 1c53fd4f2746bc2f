"""Hosts with devices that are not here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from llmc.compiler.targets.openvino import static_target
from llmc.runtime.executors.openvino import device
from tests.runtime.executors.openvino.fake_devices import FakeCore

Host = Callable[..., FakeCore]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """This host with an NPU of a platform, a GPU of a driver, or Intel's NPU compiler."""

    def host_(npu: str | None = None, gpu: str | None = None, library: bytes | None = None) -> FakeCore:
        folder = tmp_path / f"host-{len(list(tmp_path.iterdir()))}"
        libs = folder / "libs"
        libs.mkdir(parents=True)
        for name in static_target.LIBRARIES if library is not None else ():
            (libs / static_target.library_name(name)).write_bytes(library or b"")
        for node in [*(["accel/accel0"] if npu else []), *(["dri/renderD128"] if gpu else [])]:
            (folder / "dev" / node).parent.mkdir(parents=True, exist_ok=True)
            (folder / "dev" / node).touch()
        core = FakeCore(npu=npu, gpu=gpu, library=library is not None)
        monkeypatch.setattr(static_target, "DEV", folder / "dev")
        monkeypatch.setattr(static_target, "_folder", lambda: libs)
        monkeypatch.setattr(device, "_core", lambda: core)
        return core

    return host_
