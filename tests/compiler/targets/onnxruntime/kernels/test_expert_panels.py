"""Experts of a graph lowered for llmc's kernels: quantised one by one, and near to what float32 gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmc.compiler.architectures.shared.size import Weights
from llmc.compiler.options import CompileOptions
from llmc.compiler.targets.onnxruntime.formats import OnnxOptions
from llmc.compiler.targets.onnxruntime.kernels.panels import PARTS, eachpq4, eachpq8, panel_bytes
from llmc.compiler.targets.onnxruntime.target import OnnxRuntimeTarget
from llmc.compiler.targets.onnxruntime.to_onnx import to_onnx
from llmc.compiler.weights.recipes import OneExpert
from tests.compiler.targets.onnxruntime.sketch import by_onnx
from tests.compiler.targets.onnxruntime.test_experts import given, sketched

INT8, INT4 = OnnxOptions(64, panels=True), OnnxOptions(32, bits=4, panels=True)


@pytest.mark.parametrize(("options", "apart"), [(INT8, 0.03), (INT4, 0.15)], ids=["int8", "int4"])
@pytest.mark.parametrize("tokens", [1, 40])
def test_results_are_near_to_those_of_float32(library: Path, options: OnnxOptions, apart: float, tokens: int) -> None:
    feed = given(tokens)
    (exact,), (built,) = by_onnx(sketched(), feed), by_onnx(sketched(), feed, options, library)
    difference = np.sqrt(np.mean((built - exact) ** 2) / np.mean(exact**2))
    assert 0 < difference < apart


@pytest.mark.parametrize(
    ("options", "features", "op"),
    [(INT8, 48, "Experts"), (INT4, 16, "Experts"), (INT8, 40, "MoE"), (OnnxOptions(64), 48, "MoE")],
)
def test_what_the_kernel_does_not_take_is_the_runtime_s(options: OnnxOptions, features: int, op: str) -> None:
    nodes = to_onnx(sketched(features), options).model.graph.node
    assert {"Experts", "MoE"} & {node.op_type for node in nodes} == {op}


@pytest.mark.parametrize(("family", "bits", "part"), [(eachpq8, 8, "gated"), (eachpq4, 4, "gated+offsets")])
def test_each_expert_is_as_it_is_alone(family: type, bits: int, part: str) -> None:
    tensor = np.random.default_rng(3).normal(0, 1, (3, 64, 40)).astype(np.float32)
    together = family(["w"], OneExpert("w", tensor), 32)
    size = panel_bytes(64, 40, 32, bits, part.endswith("offsets"))
    assert len(together[part]) == 3 * size
    for i in range(3):
        alone = family(["w"], OneExpert("w", tensor[i : i + 1]), 32)
        assert (together[part][i * size : (i + 1) * size] == alone[part]).all()
    assert tuple(together) == PARTS and len(together) == len(PARTS)
    with pytest.raises(KeyError):
        together["data"]


@pytest.mark.parametrize(("kernels", "bits"), [("llmc", 8.5), ("onnxruntime", 32)])
def test_memory_is_estimated_as_experts_are_held(kernels: str, bits: float) -> None:
    options = CompileOptions.of(device="onnxruntime", quantize="int8", dtype="f32", kernels=kernels)
    assert OnnxRuntimeTarget().costs.weight_bits(options, Weights(1000, experts=True)) == bits
