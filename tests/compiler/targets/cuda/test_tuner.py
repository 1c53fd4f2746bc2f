"""The tuner over a fake of XLA: what it is asked for, and what is made of what it writes.

XLA on a GPU writes AutotuneResults of all that its process knows to xla_gpu_dump_autotune_results_to after a
compilation, and times nothing that xla_gpu_load_autotune_results_from has for this GPU (openxla/xla,
xla/service/gpu/autotuning/autotuner_cache.cc, 09cc560). Contract-tested, not run on hardware.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmc.artifacts.bundle.manifest import Executable
from llmc.compiler.targets.cuda import tuner
from llmc.compiler.targets.cuda.tuner import CudaTuner
from llmc.compiler.targets.cuda.tuning import parse, serialise
from llmc.errors import ArtifactError, CompileError
from llmc.runtime.executors.envelope import write_envelope
from llmc.runtime.executors.xla.envelope import FORM, StepHeader
from llmc.runtime.executors.xla.hosts import CudaHost
from tests.compiler.targets.cuda.test_autotuning import REAL
from tests.fakes import nvidia

HEADER = StepHeader("cuda", "h100", 1, "0.10.2 0.10.2 0.10.2", "step", (), (), ())
STEP = Executable("decode", 1, 1, 32, "native", "sha256:" + "0" * 64, 1, "")


@dataclass
class GpuStub:
    """XLA on a GPU: a program is the names of its products, apart by spaces; `timed` are those that it timed."""

    device: str = REAL
    timed: list[str] = field(default_factory=list)
    known: dict[str, bytes] = field(default_factory=dict)
    fails: str = ""

    def compile(
        self, blob: memoryview, header: StepHeader, devices: Any, source: str, options: Mapping[str, Any]
    ) -> None:
        del header, devices, source
        if self.fails:
            raise RuntimeError(self.fails)
        assert options["xla_gpu_autotune_level"] == 4
        if file := options.get("xla_gpu_load_autotune_results_from"):
            self.known |= {e.hlo: e.result for e in parse(Path(file).read_bytes()) if e.device == self.device}
        for matmul in bytes(blob).decode().split():
            if matmul not in self.known:
                self.timed.append(matmul)
                self.known[matmul] = b"fast"
        Path(options["xla_gpu_dump_autotune_results_to"]).write_bytes(serialise(self.known, self.device))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> GpuStub:
    built = GpuStub()
    nvidia.install(monkeypatch, nvidia.H100)
    monkeypatch.setattr(tuner, "compile_exported", built.compile)
    monkeypatch.setattr(tuner, "toolchain_version", lambda platform: HEADER.jax)
    device = SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(CudaHost, "open", lambda host, devices, threads: [device] * devices)
    return built


def bundle(matmuls: str) -> Any:
    """One whose executable's portable program has these products."""
    file = write_envelope(HEADER.to_json(), {"export": matmuls.encode(), "native": b""}, FORM)
    return SimpleNamespace(path=Path("bundle"), files=SimpleNamespace(read=lambda name: file))


def test_results_say_which_gpu_they_are_of(gpu: GpuStub) -> None:
    found = CudaTuner().tune(bundle("qkv down"), STEP, None)
    assert found is not None
    assert found.built_for == {"gpu": "NVIDIA H100 80GB HBM3", "device": REAL, "compiler": HEADER.jax}
    assert found.found == {"qkv": b"fast", "down": b"fast"}


def test_what_is_known_is_not_timed_again(gpu: GpuStub) -> None:
    before = CudaTuner().tune(bundle("qkv"), STEP, None)
    gpu.known.clear()
    after = CudaTuner().tune(bundle("qkv head"), STEP, before)
    assert gpu.timed == ["qkv", "head"]
    assert after is not None
    assert set(after.found) == {"qkv", "head"}


def test_an_executable_without_matmuls_adds_nothing(gpu: GpuStub) -> None:
    assert CudaTuner().tune(bundle(""), STEP, None) is None


def test_results_of_another_gpu_are_not_mixed_in(gpu: GpuStub) -> None:
    before = CudaTuner().tune(bundle("qkv"), STEP, None)
    gpu.device = REAL.replace("Cores: 132", "Cores: 114")
    gpu.known.clear()
    with pytest.raises(ArtifactError, match="keep a file for each"):
        CudaTuner().tune(bundle("qkv"), STEP, before)


def test_xla_s_own_words_are_in_the_error(gpu: GpuStub) -> None:
    gpu.fails = "RESOURCE_EXHAUSTED: out of memory"
    with pytest.raises(CompileError, match=r"bundle: decode batch=1 .* NVIDIA H100 80GB HBM3: RESOURCE_EXHAUSTED"):
        CudaTuner().tune(bundle("qkv"), STEP, None)


def test_a_host_without_a_gpu_is_reported_where_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmc.compiler.targets.cuda.toolkit.metadata.version", lambda name: "1")
    nvidia.install(monkeypatch)
    assert CudaTuner().lacks() == "an NVIDIA GPU; run llmc tune on its host, and copy the file (-o) here"
    nvidia.install(monkeypatch, nvidia.H100)
    assert CudaTuner().lacks() == ""
