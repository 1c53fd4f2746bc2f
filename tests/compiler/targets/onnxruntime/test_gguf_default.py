"""The default of --quantize for a GGUF in blocks: what keeps these, what does not, and what is said of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmc.artifacts.bundle.kernel_sets import KERNEL_SETS
from llmc.artifacts.store.store import Store
from llmc.buckets.limits import Limits
from llmc.compiler.architectures.shared.block_form import BlockForm
from llmc.compiler.architectures.shared.size import Weights
from llmc.compiler.checkpoint.gguf_file import BLOCK_TYPES
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import dry_run
from llmc.compiler.pipeline.resolve import CompileJob
from llmc.compiler.targets import cpu as cpu_target
from llmc.compiler.targets import open_target
from llmc.compiler.targets.base import Deployment
from llmc.compiler.targets.cpu import EngineChoice
from llmc.compiler.targets.onnxruntime.options import KEPT, in_gguf_blocks
from llmc.testing.toy import toy_plan
from tests.compiler.checkpoint.writers import write_blocks, write_gguf

BLOCKS = {"embed_tokens": "Q8_0", "_proj": "Q4_1"}
FLOATS = (None, {"_proj": "F16"}, {"embed_tokens": "Q8_0", "_proj": "F16"}, {"embed_tokens": "F16", "_proj": "Q4_1"})
ISA = KERNEL_SETS[1].isa


@pytest.fixture
def isa(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a CPU that llmc's kernels are for."""
    monkeypatch.setattr("llmc.compiler.targets.onnxruntime.target.cpu_features", lambda: ISA)


def job(model: Path, device: str = "onnxruntime", **options: Any) -> CompileJob:
    return CompileJob.of(str(model), toy_plan(), CompileOptions.of(device, **options))


@pytest.mark.usefixtures("isa")
def test_a_gguf_in_blocks_is_kept_and_the_reason_is_said(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "m.gguf", types=BLOCKS)
    found = job(model)
    assert (found.options.quantize, found.options.own["kernels"], found.requested.quantize) == ("keep", "llmc", None)
    assert (found.why, found.decided, found.because) == ("", KEPT, "")
    dry = dry_run(CompileJob.of(str(model), toy_plan(), CompileOptions("onnxruntime")), Store(tmp_path / "s"))
    requested = dry_run(
        CompileJob.of(str(model), toy_plan(), CompileOptions("onnxruntime", "keep")), Store(tmp_path / "s")
    )
    assert dry["choice"] == f"{requested['choice']}; {KEPT}"
    assert dry["estimates"] == requested["estimates"]
    assert job(model, cpu="neoverse-n1", verify="none").options.quantize == "keep", "for kernels of another CPU, too"


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("kind", sorted(BLOCK_TYPES))
def test_every_type_that_has_blocks_is_kept(kind: str) -> None:
    """With the norms that a model has beside them; in no more than int8 takes."""
    assert in_gguf_blocks([Weights(10_000, BLOCK_TYPES[kind].form), Weights(90)])
    assert not in_gguf_blocks([Weights(10_000, BLOCK_TYPES[kind].form), Weights(110)])
    weights = [Weights(10_000, BLOCK_TYPES[kind].form)]
    assert not in_gguf_blocks([])
    target = open_target("onnxruntime")
    kept = target.resolve(CompileOptions("onnxruntime"), Deployment(Limits(8), {}, {}, weights)).options
    int8 = target.configure(CompileOptions("onnxruntime"))
    assert (kept.quantize, int8.quantize) == ("keep", "int8")
    assert target.costs.weight_bits(kept, weights[0]) <= target.costs.weight_bits(int8, weights[0])


@pytest.mark.usefixtures("isa")
def test_a_mixed_file_of_k_quants_is_kept(tmp_path: Path) -> None:
    write_blocks(tmp_path / "m.gguf", {"embed_tokens": "Q6_K", "down_proj": "Q6_K", "": "Q4_K"})
    assert job(tmp_path / "m.gguf").options.quantize == "keep"


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("types", FLOATS, ids=str)
def test_floats_anywhere_are_rounded_to_int8(types: dict[str, str] | None, tmp_path: Path) -> None:
    found = job(write_gguf(tmp_path / "m.gguf", types=types))
    assert (found.options.quantize, found.decided) == ("int8", "")


@pytest.mark.parametrize("kind", ["gptq", "awq", "pack-quantized"])
def test_quantized_weights_of_other_checkpoints_are_not_kept_unasked(kind: str) -> None:
    assert not in_gguf_blocks([Weights(10_000, BlockForm(kind, 4, 32, "zeros"))])


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(
    ("device", "options", "quantize"),
    [
        ("onnxruntime", {"quantize": "int8"}, "int8"),
        ("onnxruntime", {"quantize": "none"}, "none"),
        ("onnxruntime", {"kernels": "onnxruntime"}, "int8"),
        ("onnxruntime", {"specialise": True}, "int8"),
        ("openvino", {}, "int8"),
        ("xla", {}, "none"),
        ("cpu", {"kernels": "onnxruntime"}, "int8"),
        ("cpu", {"kernels": "llmc"}, "keep"),
        ("cpu", {"group_size": 64}, "int8"),
    ],
)  # fmt: skip
def test_what_was_requested_and_other_matmuls_have_their_own(
    device: str, options: dict[str, Any], quantize: str, tmp_path: Path
) -> None:
    assert job(write_gguf(tmp_path / "m.gguf", types=BLOCKS), device, **options).options.quantize == quantize


def test_a_cpu_without_kernels_has_int8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmc.compiler.targets.onnxruntime.target.cpu_features", lambda: ("x86_64",))
    assert job(write_gguf(tmp_path / "m.gguf", types=BLOCKS)).options.quantize == "int8"


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(("engine", "quantize"), [("onnxruntime", "keep"), ("openvino", "int8")])
def test_what_cpu_stands_for_decides(
    engine: str, quantize: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_target, "choose", lambda *_: EngineChoice(engine, "so it was told"))
    found = job(write_gguf(tmp_path / "m.gguf", types=BLOCKS), "cpu")
    assert (found.options.quantize, found.target.description.name) == (quantize, engine)
    assert found.because.endswith(": so it was told") and found.decided == (KEPT if quantize == "keep" else "")
