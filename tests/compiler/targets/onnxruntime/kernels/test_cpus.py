"""Bundles for CPUs that are not here: what --cpu takes, and which library is opened."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmc.artifacts.bundle.kernel_sets import KERNEL_SETS, common_isa, sets_in
from llmc.artifacts.store.store import Store
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import compile_bundle
from llmc.compiler.targets import open_target
from llmc.compiler.targets.onnxruntime.kernels.cpus import sets_for
from llmc.errors import ArtifactError, InputError
from llmc.runtime.bundle import Bundle
from llmc.runtime.executors import compatibility, open_executor
from llmc.runtime.executors.onnxruntime import executables
from tests.compiler import tiny
from tests.compiler.targets.onnxruntime.kernels.host import own_set
from tests.compiler.targets.onnxruntime.kernels.test_build import PLAN

AMX, AVX512_BF16, AVX512, AVX_VNNI, AVX2, I8MM, NEON = KERNEL_SETS


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [("native", [AVX2]), ("all", list(KERNEL_SETS)), ("avx-vnni", [AVX_VNNI]), ("zen4", [AVX512_BF16]),
     ("znver3", [AVX2]), ("sapphirerapids", [AMX]), ("icelake-server", [AVX512]),
     ("alderlake", [AVX_VNNI]), ("x86-64-v3", [AVX2]), ("cooperlake", [AVX512_BF16]),
     ("haswell, Zen4 ,native", [AVX512_BF16, AVX2]), ("neoverse-n1", [NEON]), ("neoverse_v2,apple-m1", [I8MM, NEON]),
     ("neoverse-v1", [I8MM]), ("apple-m2", [I8MM]), ("skylake,ampere1", [AVX2, I8MM])],
)  # fmt: skip
def test_cpus_are_known_by_their_names(asked: str, wanted: list[Any]) -> None:
    assert list(sets_for(asked, AVX2.isa)) == wanted


@pytest.mark.parametrize(
    ("asked", "says"),
    [("sapphirerapid", r"--cpu sapphirerapid: no CPU of this name .* Near it are: .*sapphirerapids\."),
     ("cortex-a53", "--cpu cortex-a53: llmc's kernels have no set for this CPU"),
     ("nehalem", r"no set for this CPU \(amx-int8 needs amx_tile, .*; avx512-bf16 needs .*--kernels onnxruntime"),
     ("haswell,", r"--cpu : no CPU of this name"), ("-o", "--cpu -o: no CPU of this name")],
)  # fmt: skip
def test_a_cpu_that_is_not_known_or_runs_no_kernels_is_said(asked: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        sets_for(asked, AVX2.isa)


def test_native_where_the_host_runs_none_is_said() -> None:
    with pytest.raises(InputError, match="--cpu native: llmc's kernels have no set for this CPU"):
        sets_for("native", ("x86_64", "avx"))


def configured(**given: Any) -> CompileOptions:
    return open_target("onnxruntime").configure(CompileOptions.of("onnxruntime", **given))


def test_options_that_do_not_go_together_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmc.compiler.targets.onnxruntime.target.cpu_features", lambda: AVX2.isa)
    for more in ({"quantize": "none"}, {"specialise": True}, {"kernels": "onnxruntime"}):
        with pytest.raises(InputError, match="--cpu is for llmc's kernels, and none are built"):
            configured(**{"quantize": "int8", "cpu": "avx2", **more})
    with pytest.raises(InputError, match=r"--cpu zen4: no kernels for this host's CPU .* name native too, or .*none"):
        configured(quantize="int8", cpu="zen4")
    assert configured(quantize="int8", cpu="zen4", verify="none").get("kernels") == "llmc"
    assert configured(quantize="int8", cpu="zen4,native").get("kernels") == "llmc"


@pytest.fixture(scope="module")
def bundle(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For all CPUs."""
    folder = tmp_path_factory.mktemp("all")
    options = CompileOptions.of("onnxruntime", quantize="int8", cpu="all", verify="all")
    model = tiny.write_model(folder / "model", "llama")
    compile_bundle(str(model), folder / "bundle", PLAN, options, Store(folder / "store"), lambda event: None)
    return folder / "bundle"


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


@pytest.mark.parametrize("kernels", KERNEL_SETS, ids=lambda s: s.name)
def test_a_cpu_opens_what_it_has_the_features_of(bundle: Path, monkeypatch: pytest.MonkeyPatch, kernels: Any) -> None:
    monkeypatch.setattr(compatibility, "cpu_features", lambda: kernels.isa)
    assert compatibility.kernels_here(Bundle.open(bundle)) == kernels


def test_a_cpu_without_any_is_told_what_there_is(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compatibility, "cpu_features", lambda: ("aarch64", "asimd"))
    with pytest.raises(
        ArtifactError,
        match=r"are for amx-int8 \(without .*\) or avx512-bf16 \(without .*\) or avx512-vnni .* or avx2 .*--cpu",
    ):
        open_executor(Bundle.open(bundle), 2, 2)


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
