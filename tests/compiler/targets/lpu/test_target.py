"""LPUs: HyperDex's artifact where it is installed, portable programs where not, and what is refused."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmc.artifacts.bundle.trust import code_of_bundle
from llmc.artifacts.store.store import Store
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compilation import Compilation
from llmc.compiler.pipeline.compile import compile_bundle, dry_run
from llmc.compiler.pipeline.on_target import compile_on_target
from llmc.compiler.pipeline.planning import plan_for
from llmc.compiler.pipeline.resolve import CompileJob
from llmc.compiler.pipeline.reverify import verify_again
from llmc.compiler.targets import lpu as lpu_target
from llmc.compiler.targets import open_target
from llmc.compiler.targets.lpu import U55C_BYTES
from llmc.errors import ArtifactError, CompileError, DeviceError, InputError, VerificationError
from llmc.runtime.bundle import Bundle
from llmc.runtime.executors.lpu.hyperdex import Artifact
from llmc.runtime.llm import BundleLLM
from llmc.settings import Settings
from llmc.testing.toy import toy_plan
from tests.compiler import tiny
from tests.hyperdex import LENGTH, LpuHost, another_version
from tests.tiers import default_cases, full

NOWHERE = Settings()


@pytest.fixture(autouse=True)
def own_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def logs() -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob("llmc-hyperdex-*.log"))


def test_one_native_artifact_serves_the_plan(lpu: LpuHost) -> None:
    manifest = lpu.open().manifest
    (executable,) = manifest.executables
    assert (str(executable), executable.state, manifest.executor) == ("any", "native", "lpu")
    assert executable.buckets == len(lpu.open().plan.buckets)
    assert manifest.toolchain == {"hyperdex-toolchain": "1.5.1"} and manifest.options["devices"] == 2
    assert manifest.options["remaining"] == "" and manifest.plan["limits"]["max_num_seqs"] == 1
    assert code_of_bundle(manifest)


@default_cases(3)
@pytest.mark.parametrize(
    ("given", "anew"),
    [
        ({}, False),
        ({"jobs": 2}, False),
        ({"device": "lpu:4"}, True),
        ({"max_model_len": 40}, True),
        ({"low_memory_usage": True}, True),
        ({"fast_compile": False}, True),
    ],
)
def test_it_is_compiled_again_for_what_it_depends_on_alone(
    lpu: LpuHost, tmp_path: Path, given: dict[str, Any], anew: bool
) -> None:
    result, built = lpu.compile(tmp_path / "again", **given)
    assert ("hyperdex" in built) == anew == (result.built == 1)
    if anew:
        _, built = lpu.compile(tmp_path / "again", **given)
        assert "hyperdex" not in built
    artifact = Artifact.of(Bundle.open(tmp_path / "again"))
    assert artifact.devices == int(given.get("device", "lpu:2")[4:])
    assert artifact.low_memory_usage == given.get("low_memory_usage", False)
    assert any(path.endswith(".safetensors") for path in artifact.files) != artifact.low_memory_usage


def test_another_version_compiles_again(lpu: LpuHost, tmp_path: Path) -> None:
    other = replace(lpu.settings, hyperdex_python=str(another_version(tmp_path, "1.6.0+cu126")))
    _, built = lpu.compile(tmp_path / "again", settings=other)
    assert "hyperdex" in built
    assert Bundle.open(tmp_path / "again").manifest.toolchain == {"hyperdex-toolchain": "1.6.0"}


def test_gpus_need_what_low_memory_usage_drops(lpu: LpuHost, tmp_path: Path) -> None:
    lpu.compile(tmp_path / "low", low_memory_usage=True, max_model_len=44)
    with pytest.raises(ArtifactError, match=r"compiled with --low-memory-usage, .* \(NUM_GPU_DEVICES is 1\)"):
        BundleLLM(Bundle.open(tmp_path / "low", replace(lpu.settings, num_gpu_devices=1)))


@full
def test_it_is_verified_by_its_tokens_and_can_be_again(
    lpu: LpuHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, _ = lpu.compile(tmp_path / "proven", verify="sample")
    found = result.verification
    assert (found["mode"], found["by"], found["reference"]) == ("sample", "tokens", "transformers")
    assert found["rows"] >= 32 and found["top1"] == 1.0
    assert found["greedy_equal"] == found["greedy_sequences"] >= 4
    monkeypatch.setenv("LLMC_HYPERDEX_PYTHON", str(lpu.settings.hyperdex_python))
    again = verify_again(tmp_path / "proven", str(lpu.model), False, lpu.store, lambda _: None, lambda d, t: None)
    assert (again["rows"], again["top1"]) == (found["rows"], 1.0)
    monkeypatch.setenv("FAKE_LPUS", "1")
    with pytest.raises(DeviceError, match="--verify none compiles without running anything"):
        lpu.compile(tmp_path / "unproven", verify="sample")
    assert not (tmp_path / "unproven").exists()


def test_a_device_that_gives_other_tokens_is_refused(
    lpu: LpuHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_HYPERDEX", "wrong:tokens")
    with pytest.raises(
        VerificationError, match=r"tokens disagree with the reference model: .* greedy token 1 of probe"
    ):
        lpu.compile(tmp_path / "wrong", verify="sample")
    assert not (tmp_path / "wrong").exists()


@default_cases(2)
@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ("error:compile", r"HyperDex failed \(compile\): RuntimeError: Failed to make network.* Its log: .*\.log"),
        ("kill:compile", r"was killed by signal 9 \(SIGKILL\) \(compile\)"),
        ("exit:import", r"HyperDex failed \(compile\): SystemExit: 7"),
        ("hang:compile", r"did not answer within 0\.5 seconds \(compile\) and was ended"),
        ("nothing:compile", "exited without an error, but wrote no file"),
    ],
)
def test_a_compiler_that_fails_leaves_no_bundle_and_its_log(
    lpu: LpuHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: str, message: str
) -> None:
    failing = replace(lpu, store=Store(tmp_path / "store"))
    with monkeypatch.context() as patch:
        patch.setenv("FAKE_HYPERDEX", failure)
        if failure.startswith("hang"):
            patch.setattr(lpu_target, "COMPILE_S", 0.5)
        with pytest.raises(CompileError, match=message):
            failing.compile(tmp_path / "failed", max_model_len=32)
    assert not (tmp_path / "failed").exists()
    assert len(logs()) == (failure != "nothing:compile")
    failing.compile(tmp_path / "failed", max_model_len=32)
    assert (tmp_path / "failed").exists()


def test_an_architecture_that_hyperdex_lacks_is_its_error(
    lpu: LpuHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.write_model(tmp_path / "qwen3", "qwen3")
    other = LpuHost(model, lpu.store, tmp_path / "bundle", lpu.settings)
    with pytest.raises(CompileError, match=r"'Qwen3ForCausalLM'. is not supported by HyperDex"):
        other.compile()


def test_a_dry_run_and_the_lowered_form_name_the_artifact(lpu: LpuHost, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_for(str(lpu.model), max_model_len=LENGTH, device="lpu:2", settings=lpu.settings)
    options = CompileOptions.of("lpu:2", verify="none")
    found = dry_run(CompileJob.of(str(lpu.model), plan, options, lpu.settings), lpu.store)
    assert (found["to_build"], found["cached"]) == (0, 1)
    monkeypatch.setenv("LLMC_HYPERDEX_PYTHON", str(lpu.settings.hyperdex_python))
    ((name, text),) = Compilation.of(lpu.model, options, lpu.store, lpu.settings, plan=plan).programs(
        "lowered", lambda _: None
    )
    assert name == "artifact" and json.loads(text)["max_length"] == LENGTH


def test_without_hyperdex_programs_are_portable_and_what_is_left_is_named(lpu: LpuHost, tmp_path: Path) -> None:
    result, _ = lpu.compile(tmp_path / "portable", settings=NOWHERE, verify="sample")
    assert (result.native, result.portable) == (0, len(plan_for(None, max_model_len=LENGTH, max_num_seqs=1).buckets))
    assert 'uv pip install -i "$HYPERACCEL_INDEX" vllm-orion' in result.remaining
    assert result.verification["top1"] == 1.0 and result.verification["leak"] == 0
    bundle = Bundle.open(tmp_path / "portable")
    assert (bundle.manifest.executor, bundle.manifest.options["dtype"]) == ("torch", "bf16")
    assert code_of_bundle(bundle.manifest) is None
    with pytest.raises(DeviceError, match=r"only portable on this host; .* again with --device lpu:2"):
        lpu.compile(tmp_path / "native", settings=NOWHERE, require_native=True)
    with pytest.raises(
        InputError, match="cannot be compiled on the target from its own files: on a host with HyperDex, compile the"
    ):
        compile_on_target(tmp_path / "portable", lpu.store, lambda _: None)


def test_gpus_are_its_prefill_devices_and_no_other() -> None:
    """What `--prefill-device cuda:2 --decode-device lpu:4` needs: one bundle, and HyperDex's own hybrid mode."""
    target = open_target("lpu:4", NOWHERE)
    assert target.prefills_on("cuda:2") == {"NUM_GPU_DEVICES": "2", "NUM_LPU_DEVICES": "4"}
    assert target.prefills_on("cuda") == {"NUM_GPU_DEVICES": "1", "NUM_LPU_DEVICES": "4"}
    assert target.prefills_on("onnxruntime") is None
    with pytest.raises(InputError, match="--prefill-device cuda:x: give a number of GPUs after the colon"):
        target.prefills_on("cuda:x")


@pytest.mark.parametrize("detail", ["3", "0", "6", "-2", "two", "1.0", "²", "99999999"])
def test_the_number_of_lpus_is_a_power_of_two(detail: str) -> None:
    with pytest.raises(InputError, match=f"--device lpu:{detail}: "):
        open_target(f"lpu:{detail}", NOWHERE)


def test_the_number_of_lpus_may_come_from_the_environment() -> None:
    def lpus(device: str, settings: Settings) -> int:
        return open_target(device, settings).costs.devices(CompileOptions())

    assert lpus("lpu", NOWHERE) == 1
    assert lpus("lpu", Settings(num_lpu_devices=4)) == 4
    assert lpus("lpu:2", Settings(num_lpu_devices=4)) == 2
    with pytest.raises(InputError, match="NUM_LPU_DEVICES=3: HyperDex compiles for a power of two"):
        lpus("lpu", Settings(num_lpu_devices=3))
    assert open_target("lpu:4", NOWHERE).costs.memory(CompileOptions()) == (
        4 * U55C_BYTES,
        "of 4 LPUs on Alveo U55C cards",
    )


def test_a_plan_of_several_sequences_is_refused(lpu: LpuHost, tmp_path: Path) -> None:
    options = CompileOptions.of("lpu:2", verify="none")
    with pytest.raises(InputError, match=r"the plan has 4 sequences at once, .* plan with --max-num-seqs 1"):
        compile_bundle(str(lpu.model), tmp_path / "b", toy_plan(), options, lpu.store, lambda _: None, lpu.settings)
    created = plan_for(str(lpu.model), max_model_len=LENGTH, device="lpu")
    assert created.limits.max_num_seqs == 1 and created.provenance.origins["max_num_seqs"] == "device lpu"
    assert plan_for(str(lpu.model), max_model_len=LENGTH, device="lpu", max_num_seqs=2).limits.max_num_seqs == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"specialise": True}, "one artifact serves every bucket"),
        ({"sample_top_k": 4}, "returns tokens, not logits"),
        ({"dtype": "f32"}, "--dtype f32 is not offered for device lpu; offered: bf16"),
        ({"quantize": "int8"}, "--quantize int8 is not offered for device lpu; offered: none"),
        ({"tensor_parallel": 2}, "--tensor-parallel is for "),
    ],
)
def test_options_that_hyperdex_has_not(lpu: LpuHost, tmp_path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        lpu.compile(tmp_path / "b", **given)
    assert not (tmp_path / "b").exists()
