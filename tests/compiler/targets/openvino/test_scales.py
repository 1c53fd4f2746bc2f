"""Finished models hold scales in the fewest bits that are exact, on disk and when they are open."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
from numpy.typing import NDArray
from openvino import opset13 as ops

from llmc.compiler.targets.openvino.finish import FinishedWeights, finish, narrowed
from llmc.runtime.cache_shape import CacheShape
from llmc.runtime.executors.openvino.device import MappedWeights, open_core, read_paged

EXACT = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0", "INFERENCE_NUM_THREADS": "1"}
ROWS, WIDTH, GROUP = 48, 64, 32
QUANTIZED = np.random.default_rng(1).integers(0, 256, ROWS * WIDTH // 2, np.uint8)
Floats = NDArray[np.float32]


def scales_in(kind: str) -> Floats:
    """[ROWS, groups]: numbers of that type that no smaller one holds."""
    found = np.random.default_rng(0).uniform(0.5, 1, (ROWS, WIDTH // GROUP)).astype(np.float32)
    if kind == "f16":
        return found.astype(np.float16).astype(np.float32)
    return 2.0 ** np.arange(-90, 6, dtype=np.float32).reshape(found.shape) if kind == "bf16" else found


def model(scales: Floats, looked_up: bool) -> ov.Model:
    """x · Wᵀ with codes of 4 bits, and rows of W."""
    data = ov.Tensor(QUANTIZED, ov.Shape((ROWS, WIDTH // GROUP, GROUP)), ov.Type.u4)
    built = ops.subtract(ops.convert(ops.constant(data), ov.Type.f32), ops.constant(np.float32(7.5)))
    built = ops.multiply(built, ops.constant(scales[..., None]))
    matrix = ops.reshape(built, ops.constant(np.array([ROWS, WIDTH])), False)
    x = ops.parameter([-1, WIDTH], np.float32, name="x")
    ids = ops.parameter([-1], np.int64, name="ids")
    matmul = ops.matmul(x, matrix, False, True)
    if not looked_up:
        return ov.Model([ops.result(matmul)], [x], "made")
    rows = ops.gather(matrix, ids, ops.constant(np.int64(0)))
    return ov.Model([ops.result(matmul), ops.result(rows)], [x, ids], "made")


def matmul_of(compiled: ov.CompiledModel) -> Floats:
    given: list[Any] = [np.eye(WIDTH, dtype=np.float32), np.zeros(1, np.int64)][: len(compiled.inputs)]
    return np.array(compiled(given)[0])


def held(compiled: ov.CompiledModel) -> str:
    """The type of the scales that the open product reads."""
    kinds = {n.get_rt_info()["layerType"].astype(str): n for n in compiled.get_runtime_model().get_ops()}
    return str(kinds["FullyConnected"].input(3).get_element_type().get_type_name())


@pytest.mark.parametrize(
    ("kind", "looked_up", "wanted"),
    [("f16", False, "f16"), ("bf16", False, "bf16"), ("f32", False, "f32"), ("f16", True, "f32")],
    ids=["float16", "bfloat16", "neither", "of a tied head"],
)
def test_scales_stay_in_the_type_that_holds_them_on_disk_and_in_memory(
    tmp_path: Path, kind: str, looked_up: bool, wanted: str
) -> None:
    built, out = model(scales_in(kind), looked_up), io.BytesIO()
    expected = matmul_of(open_core().compile_model(built, "CPU", EXACT))
    xml = finish(built, EXACT, FinishedWeights(out))
    (tmp_path / "weights").write_bytes(out.getvalue())
    size = ROWS * WIDTH // GROUP * (4 if wanted == "f32" else 2)
    assert xml.count(f'element_type="{wanted}" shape="{ROWS}, {WIDTH // GROUP}" ') == 1 + looked_up
    assert xml.count(f' size="{size}"') == 1 + looked_up
    weights = MappedWeights(tmp_path / "weights")
    read = read_paged(xml.encode(), weights, CacheShape.plain(1, 1, 16), "here")
    again = open_core().compile_model(read, "CPU", EXACT)
    np.testing.assert_array_equal(matmul_of(again), expected)
    assert held(again) == wanted


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([0.5, 2.0**-24, 65504.0, -0.0], "f16"), ([2.0**-25], "bf16"), ([65536.0], "bf16"), ([1.0, 1 + 2.0**-7], "f16"),
        ([2.0**-126, -3.0e38 // 1], "f32"), ([1 + 2.0**-11], "f32"), ([0.5, np.nan], "bf16"), ([], "f16"),
    ],
)  # fmt: skip
def test_no_number_changes_by_being_narrowed(values: list[float], kind: str) -> None:
    data = np.array(values, np.float32)
    found, _, narrow = narrowed(data.view(np.uint8).data)
    assert found == kind
    read = np.frombuffer(narrow, {"f16": np.float16, "bf16": np.uint16, "f32": np.float32}[kind])
    back = (read.astype(np.uint32) << 16).view(np.float32) if kind == "bf16" else read.astype(np.float32)
    np.testing.assert_array_equal(back, data)
