"""Quantised checkpoints whose codes llmc's own kernels multiply: every case's weights exactly, a few compiled."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.checkpoint.base import stored_forms
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import compile_bundle
from llmc.compiler.targets import open_target
from llmc.compiler.targets.onnxruntime.formats import OnnxOptions
from llmc.compiler.targets.onnxruntime.kernels.panels import ZEROS, pkept4, pkept8
from tests.compiler import tiny
from tests.compiler.checkpoint.quantised import packers
from tests.compiler.targets.onnxruntime.kernels.single import run

FAMILIES = {"kept4": pkept4, "kept8": pkept8}
HALF = [case for case in packers.EXACT if "float32" not in case and case != "nvfp4-pack-quantized"]


@pytest.mark.parametrize("case", HALF)
def test_panels_hold_the_values_of_the_format(library: Path, case: str, tmp_path: Path) -> None:
    """Read row by row by the kernel itself: what is left is the rounding of a float32 sum."""
    values = packers.write(tmp_path, *packers.CASES[case])
    checkpoint = open_checkpoint(tmp_path)
    options = OnnxOptions(32, stored=stored_forms(checkpoint), panels=True)
    for name in options.stored:
        rows, width = values[name].shape
        held = options.format([name], width, normed="down_proj" not in name)
        offsets = ZEROS if held.zeros else int(held.offsets)
        part = "panels" + ("+zeros" if offsets else "")
        panels = FAMILIES[held.family]([name], checkpoint, held.block)[part]
        made = run(
            library, "Embedding", [("ids", np.arange(rows)[None]), ("w", panels)], ["y"],
            rows=rows, width=width, group=held.block, bits=held.bits, offsets=offsets,
        )["y"]  # fmt: skip
        np.testing.assert_allclose(made[0], values[name], rtol=0, atol=2.0**-22 * 2 * np.abs(values[name]).max())


@pytest.mark.parametrize(
    ("case", "line"),
    [
        ("gptq 4 bits, groups of 128, zero points", "7 kept exactly"),
        ("awq groups of 32", "7 kept exactly"),
        ("pack-quantized 8 bits by channel", "7 kept exactly"),
        ("gptq dynamic", "6 kept exactly"),
        ("gptq act-order", "0 kept exactly, 7 rounded again (7 gptq with act-order)"),
        ("nvfp4-pack-quantized", "0 kept exactly, 7 rounded again (7 float32 scales in float16)"),
    ],
)
def test_a_bundle_is_near_the_float_model(library: Path, case: str, line: str, tmp_path: Path) -> None:
    from llmc.artifacts.store.store import Store

    packers.write(tmp_path / "model", *packers.CASES[case])
    options = CompileOptions.of("onnxruntime", quantize="keep", kernels="llmc", verify="all")
    result = compile_bundle(
        str(tmp_path / "model"), tmp_path / "bundle", tiny.kinds_plan(), options, Store(tmp_path / "store"),
        lambda event: None,
    )  # fmt: skip
    assert result.verification["mean_kl"] < 2e-3
    assert open_target("onnxruntime").describe(result.analysis) == [
        f"matrices that the checkpoint stores in codes: {line}"
    ]
