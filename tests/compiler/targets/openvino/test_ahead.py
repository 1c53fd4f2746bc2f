"""With which compiler a host compiles for a GPU or an NPU, and what a host that cannot is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.artifacts.digest import digest_bytes
from llmc.compiler.targets import open_target
from llmc.compiler.targets.openvino import static_target
from llmc.errors import CompileError, InputError
from llmc.runtime.executors.openvino import device
from tests.compiler.targets.openvino.conftest import Host
from tests.runtime.executors.openvino.fake_devices import FakeCore


def test_without_device_or_library_nothing_compiles_and_the_missing_library_is_named(host: Host) -> None:
    host()
    for name in ("NPU", "NPU.4000", "NPU.3720", "GPU", "GPU.1"):
        assert static_target.compiler_for(name) is None
    assert "libopenvino_intel_npu_compiler_loader.so" in static_target.lacking("NPU.4000")
    assert "openvino#36374" in static_target.lacking("NPU")
    assert "a GPU.1 that OpenVINO finds" in static_target.lacking("GPU.1")
    assert "3720 with its driver" in static_target.lacking("NPU.3720")


@pytest.mark.parametrize("platform", ["4000", "5010", "5020", "6010"])
def test_intels_library_compiles_for_a_named_platform_on_any_host(host: Host, platform: str) -> None:
    host(library=b"compiler 8.3")
    found = static_target.compiler_for(f"NPU.{platform}")
    assert found is not None
    assert found.device == "NPU"
    assert found.properties == {"NPU_COMPILER_TYPE": "PLUGIN", "NPU_PLATFORM": platform}
    assert found.toolchain == {"npu_platform": platform, "npu_compiler": digest_bytes(b"compiler 8.3")}
    assert found.built_for == {"platform": platform}, "any driver of the platform takes it"
    assert static_target.lacking(f"NPU.{platform}") == ""


def test_the_platform_has_to_be_named_where_no_npu_is(host: Host) -> None:
    host(library=b"x")
    assert static_target.compiler_for("NPU") is None
    assert "--device openvino:NPU.4000" in static_target.lacking("NPU")
    assert static_target.compiler_for("NPU.3720") is None, "its older drivers refuse what the library makes"


def test_a_library_without_its_loader_is_none(host: Host) -> None:
    host(library=b"x")
    folder = static_target._folder()
    assert folder is not None
    (folder / static_target.library_name(static_target.LIBRARIES[0])).unlink()
    assert static_target.npu_compiler() is None


def test_the_npu_that_is_here_is_compiled_for_by_its_driver_and_named_with_it(host: Host) -> None:
    host(npu="4000")
    for name in ("NPU", "NPU.4000"):
        found = static_target.compiler_for(name)
        assert found is not None
        assert found.properties == {}
        assert found.built_for == {"platform": "4000", "driver": "1711"}
        assert found.toolchain == {"device_platform": "4000", "device_driver": "1711"}
    assert static_target.compiler_for("NPU.5010") is None, "a driver compiles for its own NPU"
    host(npu="5010", library=b"x")
    found = static_target.compiler_for("NPU")
    assert found is not None
    assert found.properties["NPU_PLATFORM"] == "5010"


def test_a_gpu_is_compiled_for_where_it_is(host: Host) -> None:
    host(gpu="25.18")
    found = static_target.compiler_for("GPU")
    assert found is not None
    assert found.built_for["driver"] == "25.18"
    assert static_target.compiler_for("GPU.1") is None


def test_a_node_without_a_driver_is_no_device(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host()
    (tmp_path / "dev" / "accel").mkdir(parents=True)
    (tmp_path / "dev" / "accel" / "accel0").touch()
    monkeypatch.setattr(static_target, "DEV", tmp_path / "dev")
    assert static_target.compiler_for("NPU") is None


@pytest.mark.parametrize("name", ["NPU.9999", "NPU.x", "GPU.a", "CPU.1", "TPU"])
def test_names_that_openvino_does_not_know_are_refused_with_those_that_it_does(name: str) -> None:
    with pytest.raises(InputError, match=r"NPU"):
        open_target(f"openvino:{name}")


def test_what_the_plugin_refuses_is_a_compile_error_with_its_words(host: Host) -> None:
    import openvino as ov
    from openvino import opset13 as ops

    host(library=b"x")
    found = static_target.compiler_for("NPU.4000")
    assert found is not None

    class Weights:
        tensor = ov.Tensor([0])

    rows = ops.parameter([-1, 3], ov.Type.f32, name="x")
    model = ov.Model([ops.result(ops.relu(rows))], [rows], "dynamic")
    core = FakeCore(library=True)
    core.read_model = lambda *_: model  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "_core", lambda: core)
        with pytest.raises(CompileError, match=r"cannot compile for NPU: to_shape was called on a dynamic shape"):
            found.compile(b"<net/>", Weights())  # type: ignore[arg-type]
        core.library = False
        with pytest.raises(CompileError, match=r"VCL compiler loading failed"):
            found.compile(b"<net/>", Weights())  # type: ignore[arg-type]
