"""`--tuning`: what stands for a file, where results come from, which are refused, and what they change."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from llmc.artifacts.digest import digest_bytes
from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.options import CompileOptions
from llmc.compiler.stages import Stages
from llmc.compiler.targets.base import Lowered
from llmc.compiler.targets.cuda import tuning
from llmc.compiler.targets.cuda.gpus import gpu_of
from llmc.compiler.targets.cuda.tuning import STAGE, Looked, Tuning, built_for, parse, reported, summary
from llmc.compiler.targets.tuning import RESULTS, Results, write_results
from llmc.errors import ArtifactError, InputError
from tests.compiler.targets.cuda.test_autotuning import H100, JAX, REAL
from tests.tiers import full
from tests.toy import Toy

FOUND = Results(built_for(REAL, "NVIDIA H100 80GB HBM3", JAX), {"qkv": b"fast"})
EMPTY = Lowered({}, {}, {})


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Tuning:
    monkeypatch.setattr(tuning, "toolchain_version", lambda platform: JAX)
    found = gpu_of("h100")
    assert found is not None
    return Tuning(found.target_config())


@pytest.fixture
def stages(tmp_path: Path) -> Stages:
    toy = Toy.make(tmp_path / "toy")
    return Stages(toy.store, open_checkpoint(str(toy.model)), toy.plan, lambda _: None)


def requested(value: object) -> CompileOptions:
    return CompileOptions.of("cuda:h100", tuning=str(value))


def written(folder: Path, results: Results = FOUND) -> Path:
    file = folder / "h100.json"
    file.write_bytes(write_results(results))
    return file


def keep(stages: Stages, results: Results) -> None:
    data = write_results(results)
    stages.run(STAGE, {"results": digest_bytes(data)}, lambda workspace: {RESULTS: workspace.put_bytes(data)})


def test_a_digest_stands_for_the_file_and_is_in_the_key(gpu: Tuning, stages: Stages, tmp_path: Path) -> None:
    file = written(tmp_path)
    options = gpu.configured(requested(file))
    digest = digest_bytes(file.read_bytes())
    assert options.own == {"tuning": digest}
    lowered = gpu.lowered(stages, EMPTY, options)
    assert lowered.components == {"tuning": digest}
    data = gpu.for_xla(lowered)
    assert data is not None
    assert parse(data) == [(H100, "qkv", b"fast")]


def test_the_store_has_them_when_the_file_is_gone(gpu: Tuning, stages: Stages, tmp_path: Path) -> None:
    options = gpu.configured(requested(written(tmp_path)))
    with pytest.raises(InputError, match=r"the store has no tuning results .*; give their file again"):
        Tuning.lowered(_fresh(gpu), stages, EMPTY, options)
    gpu.lowered(stages, EMPTY, options)
    assert Tuning.lowered(_fresh(gpu), stages, EMPTY, options).components == {"tuning": options.own["tuning"]}


def _fresh(gpu: Tuning) -> Tuning:
    found = gpu_of("h100")
    assert found is not None
    return Tuning(found.target_config())


def test_auto_takes_all_that_hold_for_the_gpu(gpu: Tuning, stages: Stages) -> None:
    assert gpu.lowered(stages, EMPTY, requested("auto")) == EMPTY
    keep(stages, FOUND)
    keep(stages, Results({**FOUND.built_for, "device": REAL.replace("9.0,", "8.9,")}, {"qkv": b"slow"}))
    keep(stages, Results(FOUND.built_for, {"down": b"fast"}))
    data = gpu.for_xla(gpu.lowered(stages, EMPTY, requested("auto")))
    assert data is not None
    assert {entry.hlo: entry.result for entry in parse(data)} == {"qkv": b"fast", "down": b"fast"}


def test_results_of_another_version_are_refused_before_anything_is_built(gpu: Tuning, tmp_path: Path) -> None:
    file = written(tmp_path, Results({**FOUND.built_for, "compiler": "0.11.0"}))
    with pytest.raises(ArtifactError, match=r"h100.json: results of NVIDIA H100 80GB HBM3 .*0\.11\.0, not 0\.10\.2"):
        gpu.configured(requested(file))


def test_a_name_that_is_no_file_is_refused(gpu: Tuning, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file or directory; name a file that llmc tune wrote"):
        gpu.configured(requested(tmp_path / "none"))


@pytest.mark.parametrize("word", ["model", "none"])
def test_without_results_nothing_is_added(gpu: Tuning, stages: Stages, word: str) -> None:
    assert gpu.lowered(stages, EMPTY, gpu.configured(requested(word))) == EMPTY


def test_people_are_reported_how_many_matmuls_were_tuned() -> None:
    used = Lowered({}, {"tuning": "sha256:1"}, {})
    found = summary(Looked(16, 14), used, requested("auto"))
    assert found == {"by": "auto", "results": "sha256:1", "tuned": 14, "of": 16}
    assert reported(found) == ["matmuls: 14 of 16 tuned on a GPU, kernels of 2 by XLA's cost model"]
    assert reported(summary(None, EMPTY, requested("none"))) == ["matmuls: kernels by the first of XLA's list"]
    assert reported({}) == []


@full
@pytest.mark.skipif(find_spec("jax_cuda13_plugin") is None, reason="XLA's plug-in is not installed")
def test_results_choose_a_matmul_s_tiles_and_those_of_others_are_passed_over() -> None:
    root = Path(__file__).parents[4]
    ran = subprocess.run(
        [sys.executable, "-m", "tests.compiler.targets.cuda.one_matmul"],
        capture_output=True,
        text=True,
        cwd=root,
        check=False,
    )
    assert ran.stdout == '1 of 1 tuned; tiles "64","128"; 8 warps\n', ran
