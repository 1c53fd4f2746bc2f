"""Bundles for an NPU: made by Intel's compiler where it is found, portable where not, refused by another NPU.

Contract-tested against fake_devices.py; neither the compiler nor an NPU was here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from llmc.artifacts.store.store import Store
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import CompileResult, compile_bundle
from llmc.compiler.pipeline.on_target import compile_on_target
from llmc.errors import ArtifactError, DeviceError
from llmc.runtime.bundle import Bundle
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.executors.openvino.device import version
from llmc.runtime.llm import BundleLLM
from llmc.testing.executors import PLAN
from tests.compiler import tiny
from tests.compiler.targets.openvino.conftest import Host
from tests.tiers import full

GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
PROMPTS = [[3, 4, 5], [9]]

Compile = Callable[..., CompileResult]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, and the store that all bundles here share."""
    folder = tmp_path_factory.mktemp("npu")
    tiny.write_model(folder / "model", "llama")
    return folder


@pytest.fixture
def compile_(folder: Path, tmp_path: Path) -> Compile:
    def run(device: str, **options: object) -> CompileResult:
        requested = CompileOptions.of(device, **{"quantize": "none", "verify": "none", **options})
        bundle = tmp_path / device.replace(":", "-")
        return compile_bundle(str(folder / "model"), bundle, PLAN, requested, Store(folder / "store"), lambda _: None)

    return run


def generated(bundle: str | Path) -> list[list[int]]:
    with BundleLLM(bundle, threads=1) as llm:
        llm.executor.open_all()
        found = [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, GREEDY)]
        assert llm.compilations == 0
    return found


@full
def test_a_native_bundle_runs_on_its_npu_on_cpus_and_on_no_other_npu(
    host: Host, compile_: Compile, caplog: pytest.LogCaptureFixture
) -> None:
    core = host(library=b"compiler 8.3")
    result = compile_("openvino:NPU.4000", verify="all")
    assert (result.native, result.portable, result.remaining) == (len(PLAN.buckets), 0, "")
    assert result.verification["mean_kl"] < 1e-9, "run on the CPU, from the portable model inside"
    assert {device for device, _ in core.compiled} == {"NPU"}
    assert all(given == {"NPU_COMPILER_TYPE": "PLUGIN", "NPU_PLATFORM": "4000"} for _, given in core.compiled)
    manifest = Bundle.open(result.bundle).manifest
    assert manifest.toolchain["npu_platform"] == "4000"
    assert manifest.toolchain["npu_compiler"].startswith("sha256:")
    expected = [tiny.greedy("llama", prompt, 4) for prompt in PROMPTS]
    assert generated(result.bundle) == expected
    assert "this host has no NPU.4000: it is opened on the CPU" in caplog.text
    core = host(npu="4000")
    assert generated(result.bundle) == expected
    assert core.compiled == [], "the NPU's host compiles nothing"
    host(npu="5010")
    with pytest.raises(ArtifactError, match=r"compiled for another device \(platform 4000, here 5010\)"):
        generated(result.bundle)


def test_a_platform_and_a_compiler_are_components_of_keys(host: Host, compile_: Compile) -> None:
    host(library=b"compiler 8.3")
    compile_("openvino:NPU.4000")
    assert compile_("openvino:NPU.5010").built == len(PLAN.buckets)
    assert compile_("openvino:NPU.4000").built == 0
    host(library=b"compiler 8.4")
    assert compile_("openvino:NPU.4000").built == len(PLAN.buckets)


def test_without_a_compiler_a_bundle_is_portable_and_says_what_is_missing(host: Host, compile_: Compile) -> None:
    host()
    result = compile_("openvino:NPU.4000")
    assert (result.native, result.portable) == (0, len(PLAN.buckets))
    assert "the NPU's host compiles each model" in result.remaining
    assert "here it lacks libopenvino_intel_npu_compiler_loader.so" in result.remaining
    with pytest.raises(DeviceError, match=r"--require-native: .*libopenvino_intel_npu_compiler.so next to") as e:
        compile_("openvino:NPU.4000", require_native=True)
    assert e.value.exit_code == 3


@full
def test_a_portable_bundle_is_finished_on_the_host_of_its_npu(host: Host, compile_: Compile, folder: Path) -> None:
    host()
    portable = Path(compile_("openvino:NPU.4000").bundle)
    with pytest.raises(DeviceError, match=r"cannot be compiled here: OpenVINO finds no NPU.4000 on this host"):
        compile_on_target(portable, Store(folder / "store"), lambda _: None, verify="sample")
    core = host(npu="4000")
    done = compile_on_target(portable, Store(folder / "store"), lambda _: None, verify="all")
    assert (done.built, done.reused) == (len(PLAN.buckets), 0)
    assert done.built_for == {"openvino": version(), "platform": "4000", "driver": "1711"}
    core.compiled.clear()
    assert generated(portable) == [tiny.greedy("llama", prompt, 4) for prompt in PROMPTS]
    assert core.compiled == []
    host(npu="5010")
    with pytest.raises(ArtifactError, match=r"compiled for another platform 4000 \(here: 5010\)"):
        generated(portable)
    host()
    with pytest.raises(DeviceError, match=r"this host has no such device"):
        generated(portable)
    with pytest.raises(DeviceError, match=r"OpenVINO finds no NPU.4000"):
        host(npu="5010")
        compile_on_target(portable, Store(folder / "store"), lambda _: None, verify="none")


@full
def test_a_bundle_of_an_npus_own_driver_names_the_driver(host: Host, compile_: Compile) -> None:
    host(npu="4000")
    result = compile_("openvino:NPU", verify="all")
    assert result.native == len(PLAN.buckets)
    assert result.verification["limits"]["quality"] == "f16", "it ran on what computes in float16"
    core = host(npu="4000")
    core.npu_driver = "1800"
    with pytest.raises(ArtifactError, match=r"driver 1711, here 1800"):
        generated(result.bundle)
