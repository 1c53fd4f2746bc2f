"""Bundles for CPUs that are not here: what --cpu takes, and which library is opened."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmc.artifacts.bundle.kernel_sets import KERNEL_SETS, common_isa, sets_in
from llmc.artifacts.store.store import Store
from llmc.cli.results import verified_line
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import compile_bundle
from llmc.compiler.targets import open_target
from llmc.compiler.targets.base import Deployment
from llmc.compiler.targets.onnxruntime.kernels.build import sets_for
from llmc.compiler.targets.onnxruntime.options import CPU_OPTION
from llmc.compiler.targets.onnxruntime.target import verified_by
from llmc.compiler.verification.limits import AccuracyLimits, VerificationPolicy
from llmc.errors import ArtifactError, InputError, VerificationError
from llmc.runtime.bundle import Bundle
from llmc.runtime.executors import compatibility, open_executor
from llmc.runtime.executors.onnxruntime import executables
from tests.compiler import tiny
from tests.compiler.targets.onnxruntime.kernels.host import own_set
from tests.compiler.targets.onnxruntime.kernels.test_build import PLAN
from tests.tiers import default_cases, full

AMX, AVX512_BF16, AVX512, AVX_VNNI, AVX2, I8MM, NEON = KERNEL_SETS


@default_cases(7)
@pytest.mark.parametrize(
    ("requested", "wanted"),
    [("native", [AVX2]), ("all", list(KERNEL_SETS)), ("avx-vnni", [AVX_VNNI]), ("zen4", [AVX512_BF16]),
     ("znver3", [AVX2]), ("sapphirerapids", [AMX]), ("icelake-server", [AVX512]),
     ("alderlake", [AVX_VNNI]), ("x86-64-v3", [AVX2]), ("cooperlake", [AVX512_BF16]),
     ("haswell, Zen4 ,native", [AVX512_BF16, AVX2]), ("neoverse-n1", [NEON]), ("neoverse_v2,apple-m1", [I8MM, NEON]),
     ("neoverse-v1", [I8MM]), ("apple-m2", [I8MM]), ("skylake,ampere1", [AVX2, I8MM]),
     ("aarch64-neoverse-v1", [I8MM]), ("x86_64-haswell", [AVX2]), ("x86_64-v3", [AVX2])],
)  # fmt: skip
def test_cpus_are_known_by_their_names(requested: str, wanted: list[Any]) -> None:
    assert list(sets_for(requested, AVX2.isa)) == wanted


@pytest.mark.parametrize(
    ("requested", "says"),
    [("sapphirerapid", r"CPU sapphirerapid: unknown CPU name.* Near it are: .*sapphirerapids\."),
     ("aarch64-haswell", "CPU aarch64-haswell: unknown CPU name.* Near it are: haswell\\."),
     ("cortex-a53", "CPU cortex-a53: llmc's kernels have no variant for this CPU"),
     ("nehalem", r"no variant for this CPU \(amx-int8 needs amx_tile, .*; avx512-bf16 needs .*--kernels onnxruntime"),
     ("haswell,", r"CPU : unknown CPU name"), ("-o", "CPU -o: unknown CPU name")],
)  # fmt: skip
def test_a_cpu_that_is_not_known_or_runs_no_kernels_is_said(requested: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        sets_for(requested, AVX2.isa)


def test_native_where_the_host_runs_none_is_said() -> None:
    with pytest.raises(InputError, match="CPU native: llmc's kernels have no variant for this CPU"):
        sets_for("native", ("x86_64", "avx"))


def configured(device: str = "onnxruntime", **given: Any) -> CompileOptions:
    return open_target(device).configure(CompileOptions.of(device, **{"quantize": "int8", **given}))


def test_options_that_do_not_go_together_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmc.compiler.targets.onnxruntime.target.cpu_features", lambda: AVX2.isa)
    for more in ({"quantize": "none"}, {"specialise": True}, {"kernels": "onnxruntime"}):
        with pytest.raises(InputError, match="--cpu is for llmc's kernels, and none are built"):
            configured(cpu="avx2", **more)
        with pytest.raises(InputError, match="--cpu is for llmc's kernels, and none are built"):
            configured("onnxruntime:avx2", **more)
    with pytest.raises(InputError, match=r"onnxruntime:zen4 and --cpu haswell: .* as --cpu zen4,haswell"):
        configured("onnxruntime:zen4", cpu="haswell")
    assert configured(cpu="zen4,native").get("kernels") == "llmc"


@pytest.mark.parametrize("device", ["onnxruntime:aarch64-neoverse-v1", "cpu:aarch64-neoverse-v1"])
def test_cpus_stand_behind_the_device_s_name_as_behind_the_option(device: str) -> None:
    found = configured(device)
    assert CPU_OPTION.of(found) == "aarch64-neoverse-v1"
    assert open_target(device).recorded(found).features == I8MM.isa
    again = open_target(device).configure(CompileOptions.of(device, cpu="aarch64-neoverse-v1"))
    assert CPU_OPTION.of(again) == CPU_OPTION.of(found)


def test_the_engine_that_takes_cpus_is_what_a_cpu_stands_for() -> None:
    deployment = Deployment(PLAN.limits, {}, {"model_type": "llama"}, [])
    found = open_target("cpu:zen4").resolve(CompileOptions.of("cpu:zen4"), deployment)
    assert (found.target.description.name, CPU_OPTION.of(found.options), found.why) == (
        "onnxruntime",
        "zen4",
        "only onnxruntime takes --cpu",
    )


@pytest.mark.parametrize(
    ("here", "requested", "cache", "stand_in"),
    [(AVX2, "zen4", "auto", AVX2), (AVX512_BF16, "neoverse-v1", "auto", AVX512_BF16),
     (AVX2, "native,zen4", "auto", None), (AVX512, "neoverse-n1", "bf16", AVX512),
     (AVX512_BF16, "neoverse-n1", "bf16", AVX512),
     (AVX512_BF16, "sapphirerapids", "auto", AVX512)],
)  # fmt: skip
def test_what_verifies_kernels_that_do_not_run_here_gives_their_bits(
    monkeypatch: pytest.MonkeyPatch, here: Any, requested: str, cache: str, stand_in: Any
) -> None:
    monkeypatch.setattr("llmc.compiler.targets.onnxruntime.target.cpu_features", lambda: here.isa)
    assert verified_by(configured(cpu=requested, kv_cache_dtype=cache), here.isa) == stand_in


@pytest.mark.parametrize(
    ("here", "requested", "cache"),
    [((*I8MM.isa,), "zen4", "bf16"), (AVX2.isa, "neoverse-v1", "bf16"), (("x86_64", "avx"), "zen4", "auto")],
)
def test_where_no_kernels_give_their_bits_nothing_is_called_verified(
    monkeypatch: pytest.MonkeyPatch, here: tuple[str, ...], requested: str, cache: str
) -> None:
    monkeypatch.setattr("llmc.compiler.targets.onnxruntime.target.cpu_features", lambda: here)
    with pytest.raises(
        InputError, match=rf"--cpu {requested}: this host cannot run kernels .* name native too, or .*none"
    ):
        configured(cpu=requested, kv_cache_dtype=cache)
    assert configured(cpu=requested, kv_cache_dtype=cache, verify="none").get("kernels") == "llmc"


@pytest.fixture(scope="module")
def bundle(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For all CPUs."""
    folder = tmp_path_factory.mktemp("all")
    options = CompileOptions.of("onnxruntime", quantize="int8", cpu="all", verify="all")
    model = tiny.write_model(folder / "model", "llama")
    compile_bundle(str(model), folder / "bundle", PLAN, options, Store(folder / "store"), lambda event: None)
    return folder / "bundle"


@full
def test_a_bundle_has_a_library_for_each_and_opens_the_fastest(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Bundle.open(bundle)
    assert sets_in(opened.manifest.files) == list(KERNEL_SETS)
    assert opened.manifest.isa == (), "they are for several machines"
    assert common_isa([AMX, AVX512, AVX_VNNI, AVX2]) == AVX2.isa
    loaded: list[Any] = []
    real = executables.open_session
    monkeypatch.setattr(executables, "open_session", lambda *a, **k: loaded.append(k["library"]) or real(*a, **k))
    executor = open_executor(opened, 2, 2)
    executor.warm([("decode", 1, 1, 47)])
    executor.close()
    assert set(loaded) == {str(opened.files.path(own_set().file))}


@full
@pytest.mark.parametrize("kernels", KERNEL_SETS, ids=lambda s: s.name)
def test_a_cpu_opens_what_it_has_the_features_of(bundle: Path, monkeypatch: pytest.MonkeyPatch, kernels: Any) -> None:
    monkeypatch.setattr(compatibility, "cpu_features", lambda: kernels.isa)
    assert compatibility.kernels_here(Bundle.open(bundle)) == kernels


@full
def test_a_limit_chooses_among_the_libraries(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMC_CPU_ISA", "avx2")
    assert compatibility.kernels_here(Bundle.open(bundle)) == AVX2


@full
def test_a_cpu_without_any_is_reported_what_there_is(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compatibility, "cpu_features", lambda: ("aarch64", "asimd"))
    message = (
        r"are for amx-int8 \(without .*\) or avx512-bf16 \(without .*\) or avx512-vnni .* or avx2 .*"
        r"--kernels onnxruntime -o "
    )
    with pytest.raises(ArtifactError, match=message):
        open_executor(Bundle.open(bundle), 2, 2)


@full
def test_a_file_system_that_maps_no_code_is_named_with_what_to_do(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mounted noexec: the system's own words are "failed to map segment from shared object"."""
    real = os.statvfs
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=real(path).f_flag | os.ST_NOEXEC))
    executor = open_executor(Bundle.open(bundle), 2, 2)
    with pytest.raises(ArtifactError, match=r"mounted noexec; copy the bundle to another one .* --kernels onnxruntime"):
        executor.warm([("decode", 1, 1, 47)])
    executor.close()


@full
def test_a_bundle_for_a_cpu_that_is_not_here_is_verified_with_the_kernels_that_are(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = "onnxruntime:aarch64-neoverse-v1"
    options = CompileOptions.of(device, quantize="int8", verify="all")
    model, store = bundle.parent / "model", Store(bundle.parent / "store")
    compile_bundle(str(model), tmp_path / "bundle", PLAN, options, store, lambda event: None)
    manifest = Bundle.open(tmp_path / "bundle").manifest
    assert (manifest.device, manifest.isa, sets_in(manifest.files)) == (device, I8MM.isa, [I8MM])
    assert not {s.file for s in KERNEL_SETS if s != I8MM} & {*manifest.files}
    assert manifest.verification["stand_ins"] == [own_set().file]
    assert "ran in place of its own, for other hosts" in verified_line(manifest.verification, 1)
    assert "stand_ins" not in Bundle.open(bundle).manifest.verification
    line = f"--device onnxruntime --cpu neon-i8mm,{own_set().name} "
    with pytest.raises(ArtifactError, match=rf"are for neon-i8mm \(without aarch64, .*{line}"):
        open_executor(Bundle.open(tmp_path / "bundle"), 2, 2)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC))
    with pytest.raises(ArtifactError, match=r"mounted noexec.* --device onnxruntime --kernels onnxruntime -o "):
        compatibility.require_mappable(Bundle.open(tmp_path / "bundle"), tmp_path)


@full
def test_numbers_too_far_from_the_model_s_refuse_a_bundle_for_a_cpu_that_is_not_here(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = "onnxruntime:aarch64-neoverse-v1"
    monkeypatch.setattr(VerificationPolicy, "limits", lambda self, options: AccuracyLimits(0.0, 1.0, True, 0.0, 0.0))
    model, store = bundle.parent / "model", Store(bundle.parent / "store")
    options = CompileOptions.of(device, quantize="int8", verify="all")
    with pytest.raises(VerificationError):
        compile_bundle(str(model), tmp_path / "bundle", PLAN, options, store, lambda event: None)
    assert not (tmp_path / "bundle").exists()
