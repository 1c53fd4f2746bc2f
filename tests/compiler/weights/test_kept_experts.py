"""Quantized experts of a checkpoint: kept if matmuls support the form, and counted if they do not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmc.artifacts.store.store import Store
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import compile_bundle
from llmc.compiler.targets import open_target
from tests.compiler import tiny
from tests.compiler.checkpoint.quantised import packers
from tests.compiler.targets.onnxruntime.kernels.host import own_set

FOUR = (packers.awq_config(16), packers.awq(16))


@pytest.mark.full
@pytest.mark.parametrize(
    ("device", "kernels", "kept"),
    [("openvino", None, "12 kept exactly"), ("onnxruntime", "llmc", "12 kept exactly"),
     ("onnxruntime", "onnxruntime", "8 kept exactly, 4 widened to float32")],
)  # fmt: skip
def test_experts_are_computed_with_the_values_that_are_stored(
    device: str, kernels: str | None, kept: str, tmp_path: Path
) -> None:
    if kernels == "llmc":
        own_set()
    packers.write(tmp_path / "model", *FOUR, case="qwen3_moe")
    options = CompileOptions.of(device=device, quantize="keep", verify="all", kernels=kernels)
    built = compile_bundle(
        str(tmp_path / "model"), tmp_path / "bundle", tiny.kinds_plan(), options, Store(tmp_path / "store"),
        lambda event: None,
    )  # fmt: skip
    (line,) = open_target(built.device).describe(built.analysis)
    assert line.removeprefix("quantized matrices of the checkpoint: ") == kept
    assert built.verification["mean_kl"] < 2e-3 and np.isfinite(built.verification["max_abs"])
