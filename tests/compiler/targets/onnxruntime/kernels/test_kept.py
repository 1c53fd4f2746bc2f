"""Quantised checkpoints whose codes llmc's own kernels multiply: every case's weights exactly, a few compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.checkpoint.base import Checkpoint, stored_forms
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import CompileResult, compile_bundle
from llmc.compiler.targets import open_target
from llmc.compiler.targets.onnxruntime.formats import TABLES, ZEROS, OnnxOptions
from llmc.compiler.targets.onnxruntime.kernels.panels import pkept4, pkept6, pkept8, pkeptfloat4, pkeptiq4
from tests.compiler import tiny
from tests.compiler.checkpoint.quantised import packers
from tests.compiler.checkpoint.writers import BLOCK_KINDS, write_blocks
from tests.compiler.targets.onnxruntime.kernels.single import run
from tests.tiers import default_cases

ARCHITECTURES = {
    "kept4": pkept4, "kept6": pkept6, "kept8": pkept8, "keptiq4": pkeptiq4, "keptfloat4": pkeptfloat4,
}  # fmt: skip
HALF = [case for case in packers.EXACT if "float32" not in case and case != "nvfp4-pack-quantized"]


@default_cases(6)
@pytest.mark.parametrize("case", HALF)
def test_panels_hold_the_values_of_the_format(library: Path, case: str, tmp_path: Path) -> None:
    """Read row by row by the kernel itself: what is left is the rounding of a float32 sum."""
    values = packers.write(tmp_path, *packers.CASES[case])
    for name, built in read_back(library, open_checkpoint(tmp_path)).items():
        np.testing.assert_allclose(built, values[name], rtol=0, atol=2.0**-22 * 2 * np.abs(values[name]).max())


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_panels_hold_the_blocks_of_gguf(library: Path, kind: str, tmp_path: Path) -> None:
    """The scales of K-quants are rounded to float16, and their minimums: to 2⁻¹¹ each."""
    values = write_blocks(tmp_path / "m.gguf", {"": kind})
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    for name, built in read_back(library, checkpoint).items():
        form = checkpoint.stored_form(name)
        assert form is not None
        bound = 2.0**-21 if form.scales == "float16" else 2.0**-11 * (2 if form.offsets else 1)
        np.testing.assert_allclose(built, values[name], rtol=0, atol=bound * np.abs(values[name]).max())


def read_back(library: Path, checkpoint: Checkpoint) -> dict[str, NDArray[np.float32]]:
    """The rows of each matrix in blocks, as the kernel reads them from its panels."""
    options, found = OnnxOptions(32, stored=stored_forms(checkpoint), panels=True), {}
    for name in set(options.stored).intersection(checkpoint.tensor_names()):
        rows, width = checkpoint.shape(name)
        held = options.format([name], width, normed="down_proj" not in name)
        offsets = ZEROS if held.zeros else int(held.offsets)
        part = {ZEROS: "panels+zeros", 1: "panels+offsets", 0: "panels"}[offsets]
        panels = ARCHITECTURES[held.family]([name], checkpoint, held.block)[part]
        found[name] = run(
            library, "Embedding", [("ids", np.arange(rows)[None]), ("w", panels)], ["y"],
            rows=rows, width=width, group=held.block, bits=held.bits, offsets=offsets, table=TABLES.index(held.table),
        )["y"][0]  # fmt: skip
    return found


@pytest.mark.parametrize(
    ("kinds", "line"),
    [
        (
            {"v_proj": "Q6_K", "down": "Q6_K", "embed": "Q6_K", "": "Q4_K"},
            "0 kept exactly, 8 rounded again (8 float32 scales in float16)",
        ),
        ({"q_proj": "Q5_1", "k_proj": "Q5_0", "gate": "Q8_0", "down": "Q4_1", "": "IQ4_NL"}, "8 kept exactly"),
    ],
)
def test_a_bundle_of_gguf_s_types_is_near_the_float_model(
    library: Path, kinds: dict[str, str], line: str, tmp_path: Path
) -> None:
    write_blocks(tmp_path / "m.gguf", kinds)
    result = compiled(tmp_path / "m.gguf", tmp_path)
    assert result.verification["mean_kl"] < 1e-3
    (said,) = open_target("onnxruntime").describe(result.analysis)
    assert said.startswith(f"quantized matrices of the checkpoint: {line}")


def compiled(path: Path, folder: Path) -> CompileResult:
    from llmc.artifacts.store.store import Store

    options = CompileOptions.of("onnxruntime", quantize="keep", kernels="llmc", verify="all")
    return compile_bundle(
        str(path), folder / "bundle", tiny.kinds_plan(), options, Store(folder / "store"), lambda event: None
    )


@default_cases(2)
@pytest.mark.parametrize(
    ("case", "line"),
    [
        ("gptq 4 bits, groups of 128, zero points", "7 kept exactly"),
        ("awq groups of 32", "7 kept exactly"),
        ("pack-quantized 8 bits by channel", "7 kept exactly"),
        ("gptq dynamic", "6 kept exactly"),
        ("gptq act-order", "7 kept exactly"),
        ("nvfp4-pack-quantized", "0 kept exactly, 7 rounded again (7 float32 scales in float16)"),
    ],
)
def test_a_bundle_is_near_the_float_model(library: Path, case: str, line: str, tmp_path: Path) -> None:
    packers.write(tmp_path / "model", *packers.CASES[case])
    result = compiled(tmp_path / "model", tmp_path)
    assert result.verification["mean_kl"] < 2e-3
    assert open_target("onnxruntime").describe(result.analysis) == [f"quantized matrices of the checkpoint: {line}"]


@default_cases(1)
@pytest.mark.parametrize(
    ("stated", "pack", "line"),
    [
        (packers.awq_config(16), packers.awq(16), "12 kept exactly"),
        (
            packers.gptq_config(4, 16, dynamic={"+:.*down_proj": {"bits": 8}}),
            {name: packers.gptq(8 if name == "down_proj" else 4, 16) for name in packers.PROJECTIONS},
            "8 kept exactly, 4 rounded again (4 experts of two forms, or without --quantize keep)",
        ),
    ],
    ids=["alike", "of different bits"],
)
def test_experts_are_kept_where_one_operator_takes_both_matrices(
    library: Path, stated: dict[str, Any], pack: Any, line: str, tmp_path: Path
) -> None:
    packers.write(tmp_path / "model", stated, pack, case="qwen3_moe")
    result = compiled(tmp_path / "model", tmp_path)
    assert result.verification["mean_kl"] < 2e-3
    assert open_target("onnxruntime").describe(result.analysis) == [f"quantized matrices of the checkpoint: {line}"]
