"""LLMC_CPU_ISA: compiling as on a smaller CPU, and opening what was compiled so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmc.artifacts.bundle.kernel_sets import KERNEL_SETS, sets_in
from llmc.artifacts.store.store import Store
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import compile_bundle
from llmc.compiler.targets import open_target
from llmc.compiler.targets.openvino.target import default_dtype
from llmc.runtime import host
from llmc.runtime.bundle import Bundle
from llmc.runtime.executors import open_executor
from llmc.settings import CPU_ISA
from tests.compiler import tiny
from tests.compiler.targets.onnxruntime.kernels.host import own_set
from tests.compiler.targets.onnxruntime.kernels.test_build import PLAN
from tests.tiers import full

AMX = next(s for s in KERNEL_SETS if s.has_bf16_tiles)
AVX2 = next(s for s in KERNEL_SETS if s.name == "avx2")


@pytest.fixture(autouse=True)
def _unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the tests run under."""
    monkeypatch.delenv(CPU_ISA, raising=False)


def configured(**given: Any) -> CompileOptions:
    return open_target("onnxruntime").configure(CompileOptions.of("onnxruntime", **given))


@pytest.mark.parametrize("small", [s for s in KERNEL_SETS if {*s.features} <= {*AMX.features}], ids=lambda s: s.name)
def test_defaults_are_those_of_the_smaller_cpu(monkeypatch: pytest.MonkeyPatch, small: Any) -> None:
    monkeypatch.setattr(host, "host_features", lambda: small.isa)
    wanted = configured(), configured(quantize="none")
    monkeypatch.setattr(host, "host_features", lambda: AMX.isa)
    monkeypatch.setenv(CPU_ISA, small.name)
    assert (configured(), configured(quantize="none")) == wanted
    assert wanted[0].get("prompt_dtype") == ("bf16" if small == AMX else None)


def test_onnx_runtimes_own_kernels_are_not_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """It packs weights for all that the CPU has, which a bundle of it has to say."""
    monkeypatch.setenv(CPU_ISA, own_set().name)
    target, options = open_target("onnxruntime"), configured(kernels="onnxruntime")
    monkeypatch.setattr("llmc.compiler.targets.onnxruntime.target.host_features", lambda: AMX.isa)
    assert target.recorded(options).features == AMX.isa
    assert target.recorded(configured()).features == own_set().isa


@pytest.mark.parametrize(("device", "module"), [("openvino", "openvino.base_target"), ("xla", "xla.target")])
def test_what_libraries_compile_for_the_cpu_is_keyed_by_all_that_it_has(
    monkeypatch: pytest.MonkeyPatch, device: str, module: str
) -> None:
    monkeypatch.setattr(f"llmc.compiler.targets.{module}.host_features", lambda: AMX.isa)
    monkeypatch.setenv(CPU_ISA, "avx2")
    assert open_target(device).isa() == AMX.isa


def test_openvinos_default_precision_is_that_of_the_smaller_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "host_features", lambda: AMX.isa)
    assert default_dtype("int8") == "bf16"
    monkeypatch.setenv(CPU_ISA, "avx2")
    assert default_dtype("int8") == "f32"


def compiled(model: Path, folder: Path) -> Bundle:
    requested, store = CompileOptions.of("onnxruntime"), Store(folder / "store")
    compile_bundle(str(model), folder / "bundle", PLAN, requested, store, lambda _: None)
    return Bundle.open(folder / "bundle")


@full
def test_a_bundle_is_that_of_the_smaller_cpu_and_runs_without_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.write_model(tmp_path / "model", "llama")
    with monkeypatch.context() as patch:
        patch.setattr(host, "host_features", lambda: ("x86_64", "avx", *AVX2.features))
        smaller = compiled(model, tmp_path / "smaller").manifest
    with monkeypatch.context() as patch:
        patch.setenv(CPU_ISA, "avx2")
        limited = compiled(model, tmp_path / "limited")
    assert sets_in(limited.manifest.files) == [AVX2] and limited.manifest.isa == AVX2.isa
    assert limited.manifest.digest == smaller.digest
    executor = open_executor(limited, 2, 2)
    executor.warm([("decode", 1, 1, 47)])
    executor.close()
