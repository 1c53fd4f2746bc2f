"""Finishing on a host with a card, over a fake of it (tests/fakes/cuda, tests/fakes/pynvml.py).

AOTInductor's own part is replaced here by a package that torch would not open, and its loader by the portable program
in it: test_aotinductor.py runs the real ones.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from llmc.artifacts.bundle.trust import code_of_bundle
from llmc.artifacts.store.store import Store
from llmc.compiler.pipeline.on_target import OnTargetResult, compile_on_target
from llmc.compiler.targets.cuda.gpus import gpu_of
from llmc.compiler.targets.inductor import on_target
from llmc.compiler.targets.inductor.on_target import PackageCompiler
from llmc.errors import ArtifactError, CompileError, DeviceError, LlmcError
from llmc.runtime.bundle import Bundle
from llmc.runtime.executors import open_executor
from llmc.runtime.executors.inductor import toolchain
from llmc.runtime.executors.inductor.package import Package
from llmc.runtime.executors.whole_step.step import cache_arrays, flat_step
from llmc.runtime.portable_program import PortableProgram
from tests.fakes import cuda, nvidia, pynvml
from tests.runtime.executors.inductor.test_archive import PACKAGE
from tests.tiers import full

FACTS = {
    "gpu": "NVIDIA H100 80GB HBM3", "compute_capability": "9.0", "cuda": "13.0", "driver": "580.95.05",
    "torch": toolchain.torch_version(),
}  # fmt: skip


@pytest.fixture
def mine(bundle: Path, tmp_path: Path) -> Path:
    """A portable bundle of the test's own."""
    return shutil.copytree(bundle, tmp_path / "bundle", symlinks=True)


@pytest.fixture
def host(mine: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A host with an H100, and a torch for it; returns the names of what AOTInductor compiled."""
    cuda.install(monkeypatch, LLMC_CUDA_GRAPHS="0")
    monkeypatch.setattr(toolchain, "torch_cuda", lambda: "13.0")
    compiled: list[str] = []

    def compile_(self: PackageCompiler, bundle: Bundle, name: str, program: bytes, job: Mapping[str, Any]) -> bytes:
        assert job["device"] == "cuda"
        assert {*PortableProgram.parse(program).weights} <= {*job["weights"]}
        compiled.append(name)
        return PACKAGE

    def open_(self: Package, source: str, device: Any) -> Any:
        assert device.type == self.device == "cuda"
        arrays = cache_arrays(Bundle.open(mine), self.sizes["capacity"])
        return flat_step(PortableProgram.parse(bytes(self.program), device), self.sizes["context"], arrays)

    monkeypatch.setattr(PackageCompiler, "_compiled", compile_)
    monkeypatch.setattr(Package, "open", open_)
    return compiled


Finish = Callable[[], OnTargetResult]


@pytest.fixture
def finish(mine: Path, tmp_path: Path) -> Finish:
    return lambda: compile_on_target(mine, Store(tmp_path / "store"), lambda _: None)


@full
def test_a_finished_bundle_agrees_with_its_portable_half_and_is_code(
    mine: Path, host: list[str], finish: Finish
) -> None:
    done = finish()
    assert (done.portable, done.native, done.built_for) == (0, 2, FACTS)
    assert len(host) == 2
    opened = Bundle.open(mine)
    assert opened.manifest.options["kv_capacity"] == 17
    assert opened.manifest.options["inductor_mode"] == "default"
    assert opened.manifest.verification["on_target"]["reference"] == "its portable executables"
    assert code_of_bundle(opened.manifest)
    assert (finish().built, len(host)) == (0, 2), "from the store"


@full
@pytest.mark.parametrize(
    ("other", "error", "words"),
    [
        ((nvidia.L40S, "580.95.05"), ArtifactError, "compiled for another .*, gpu NVIDIA H100"),
        ((nvidia.H100, "590.10"), ArtifactError, r"another driver 580.95.05 \(here: 590.10\)"),
        ((None, ""), DeviceError, "this host has no such device"),
    ],
)
def test_another_host_is_reported_before_anything_is_loaded(
    other: tuple[pynvml.Device | None, str], error: type[LlmcError], words: str, mine: Path, host: list[str],
    finish: Finish, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    finish()
    gpu, driver = other
    nvidia.install(monkeypatch, *([gpu] if gpu else []), driver=driver)
    with pytest.raises(error, match=words):
        open_executor(Bundle.open(mine))


@full
def test_a_damaged_package_is_one_error(mine: Path, host: list[str], finish: Finish) -> None:
    finish()
    opened = Bundle.open(mine)
    executor = open_executor(opened)
    blob = opened.files.path(opened.manifest.executables[0].blob)
    content = bytearray(blob.read_bytes())
    content[len(content) // 2] ^= 1
    blob.chmod(0o600)
    blob.write_bytes(content)
    with pytest.raises(ArtifactError):
        executor.open_all()
    executor.close()


@full
@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"torch_version": ""}, "AOTInductor of torch 2.11 to 2.13 is needed, this host has no torch; pip install"),
        ({"torch_version": "2.14.0"}, "2.11 to 2.13 is needed, this host has 2.14.0"),
        ({"torch_cuda": ""}, "is built for CPUs here; install a build for CUDA"),
        ({"host": {}}, "this process may not use an NVIDIA GPU"),
    ],
)
def test_what_a_host_lacks_is_said(
    found: dict[str, Any], words: str, mine: Path, host: list[str], finish: Finish, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in found.items():
        monkeypatch.setattr(toolchain, name, lambda value=value: value)
    with pytest.raises(DeviceError, match=f"cannot be compiled here: .*{words}"):
        finish()


@full
def test_a_bundle_for_a_named_gpu_is_finished_there(monkeypatch: pytest.MonkeyPatch, host: list[str]) -> None:
    on_target_for = {name: PackageCompiler(gpu_of(name)) for name in ("h100", "l40s")}
    assert on_target_for["h100"].lacks() == ""
    assert "this host has NVIDIA H100 80GB HBM3, the bundle is for NVIDIA L40S; compile it there" in (
        on_target_for["l40s"].lacks()
    )


def test_a_compiler_is_needed_and_named(monkeypatch: pytest.MonkeyPatch, host: list[str]) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no-such-compiler is not on PATH; apt-get install g++" in PackageCompiler().lacks()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("import sys; print('a line', file=sys.stderr); sys.exit('nvcc: no space left')", "failed: a line | nvcc: no"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "was killed (SIGKILL), perhaps for lack of memory"),
        ("import time; time.sleep(60)", "did not end within 1 seconds, and was stopped; raise --inductor-timeout"),
    ],
)
def test_a_compile_that_fails_names_its_log(
    script: str, words: str, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing.py").write_text(script)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(on_target, "COMPILING", "failing")
    opened = Bundle.open(bundle)
    monkeypatch.setitem(opened.manifest.options, "inductor_timeout", 1 if "sleep" in script else 60)
    monkeypatch.setattr(toolchain, "host", lambda: FACTS)
    with pytest.raises(CompileError) as failed:
        PackageCompiler().compile(opened, opened.manifest.executables[0])
    assert words in str(failed.value)
    assert Path(str(failed.value).rpartition("the log: ")[2]).exists()
