"""Formats of OpenVINO models: what they multiply by, what they hold in memory, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
from numpy.typing import NDArray
from openvino import opset13 as ops

from llmc.compiler.checkpoint.base import QuantisedBlocks
from llmc.compiler.checkpoint.gguf_file import BLOCK_TYPES
from llmc.compiler.targets.openvino.formats import (
    Constants,
    Factory,
    Half,
    Held,
    WeightFormat,
    format_for,
    set_placements,
    to_xml,
)
from llmc.compiler.targets.openvino.precision import GROUPS, properties, require_precision
from llmc.compiler.weights.recipes import write_weights
from llmc.errors import DeviceError, InputError
from llmc.runtime.executors.openvino.device import MappedWeights, open_core
from tests.compiler.targets.openvino.test_compression import Source, blocks

EXACT = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0", "INFERENCE_NUM_THREADS": "1"}
EMBEDDING, HEAD, Q, V = "model.embed_tokens.weight", "lm_head.weight", "q_proj.weight", "v_proj.weight"
ROWS, WIDTH = 48, 64


class Built:
    """The matrices of `names` one above the other in a format: compiled, as x · Wᵀ and as rows looked up."""

    def __init__(self, factory: Factory, source: Source, names: list[str], folder: Path) -> None:
        constants = Constants()
        shapes = [source.tensor(n).shape for n in names]
        matrix = factory(constants).matrix(names, shapes)
        x = ops.parameter([-1, shapes[0][1]], np.float32, name="x")
        ids = ops.parameter([-1], np.int64, name="ids")
        outputs = [ops.matmul(x, matrix, False, True), ops.gather(matrix, ids, constants.small(0))]
        model = ov.Model([ops.result(o) for o in outputs], [x, ids], "made")
        with (folder / "weights").open("wb") as out:
            placed = write_weights(constants.recipes, source, constants.tables, out)
        self.bytes = {r.name: placed[r.name].length for r in constants.recipes if r.transform != "table"}
        self._weights = MappedWeights(folder / "weights")
        read = open_core().read_model(set_placements(to_xml(model, folder), placed).encode(), self._weights.tensor)
        self.compiled = open_core().compile_model(read, "CPU", EXACT)
        self.width = shapes[0][1]

    def matmul(self) -> NDArray[np.float32]:
        """Wᵀ, as the identity times it."""
        return np.array(self.compiled([np.eye(self.width, dtype=np.float32), np.zeros(1, np.int64)])[0])

    def rows(self, ids: list[int]) -> NDArray[np.float32]:
        """Rows of W."""
        return np.array(self.compiled([np.zeros((1, self.width), np.float32), np.array(ids)])[1])

    def held(self) -> tuple[str, str]:
        """Types of the weights that the matrix product and the look-up read."""
        found: dict[str, Any] = {}
        for node in self.compiled.get_runtime_model().get_ops():
            kind = node.get_rt_info()["layerType"].astype(str)
            at = {"FullyConnected": 1, "Gather": 0}.get(kind)
            if at is not None:
                found[kind] = node.input(at).get_element_type().get_type_name()
        return found["FullyConnected"], found["Gather"]


def matrix(seed: int = 0, rows: int = ROWS, width: int = WIDTH) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)


def stored(kind: str, seed: int = 0, rows: int = ROWS) -> QuantisedBlocks:
    return blocks(kind, seed, rows, WIDTH)


@pytest.mark.parametrize(
    ("quantize", "dtype", "group", "types", "error"),
    [
        ("none", "f32", None, ("f32", "f32"), 0),
        ("none", "bf16", None, ("bf16", "bf16"), 2.0**-8),
        ("none", "f16", None, ("f16", "f16"), 2.0**-11),
        ("int8", "f32", None, ("i8", "i8"), 0.5 / 127),
        ("int8", "bf16", 32, ("i8", "i8"), 0.5 / 127),
        ("int8", "f32", 64, ("i8", "i8"), 0.5 / 127),
        ("int4", "f32", 32, ("u4", "u4"), 0.21),
    ],
)
def test_a_format_is_held_as_such_and_multiplies_and_looks_up_within_its_error(
    tmp_path: Path, quantize: str, dtype: str, group: int | None, types: tuple[str, str], error: float
) -> None:
    source = Source({Q: matrix()})
    built = Built(format_for(quantize, dtype, group), source, [Q], tmp_path)
    wanted = source.tensor(Q)
    tolerance = error * np.abs(wanted).max() + 1e-6
    np.testing.assert_allclose(built.matmul().T, wanted, atol=tolerance)
    np.testing.assert_allclose(built.rows([5, 0, 5]), wanted[[5, 0, 5]], atol=tolerance)
    assert built.held() == types


@pytest.mark.parametrize(("kind", "type_"), [("Q4_1", "u4"), ("Q4_0", "u4"), ("Q8_0", "i8")])
def test_kept_blocks_multiply_as_the_checkpoint_reads(tmp_path: Path, kind: str, type_: str) -> None:
    source = Source(stored={Q: stored(kind)})
    built = Built(format_for("keep", stored=source.forms()), source, [Q], tmp_path)
    np.testing.assert_allclose(built.matmul().T, source.tensor(Q), atol=1e-4 if kind == "Q8_0" else 1e-5)
    np.testing.assert_allclose(built.rows([3]), source.tensor(Q)[[3]], atol=1e-4 if kind == "Q8_0" else 1e-5)
    assert built.held() == (type_, type_)


def test_a_block_of_one_value_is_kept_exactly(tmp_path: Path) -> None:
    constant = stored("Q4_1")
    constant.scale[:] = 0
    source = Source(stored={Q: constant})
    built = Built(format_for("keep", stored=source.forms()), source, [Q], tmp_path)
    np.testing.assert_array_equal(built.matmul().T, source.tensor(Q))


def test_kept_matrices_of_different_types_stacked_are_eight_bit_quantized_weights_that_keep_each(
    tmp_path: Path,
) -> None:
    source = Source({V: matrix(3)}, {Q: stored("Q4_1", 1), "k": stored("Q8_0", 2)})
    built = Built(format_for("keep", stored=source.forms()), source, [Q, "k", V], tmp_path)
    q, k, v = np.split(built.matmul().T, 3)
    np.testing.assert_allclose(q, source.tensor(Q), atol=1e-5)
    np.testing.assert_allclose(k, source.tensor("k"), atol=1e-4)
    np.testing.assert_allclose(v, source.tensor(V), atol=0.5 / 127 * np.abs(source.tensor(V)).max() + 1e-6)
    assert built.held()[0] == "u8"


def test_bytes_are_quantized_weights_and_a_scale_and_zero_point_for_each_group(tmp_path: Path) -> None:
    source = Source({Q: matrix()})
    count = ROWS * WIDTH
    for options, wanted in {
        ("int8", "f32", None): count + ROWS * 4,
        ("int8", "f32", 32): count + count // 32 * 4,
        ("int4", "f32", 32): count // 2 + count // 32 * 8,
        ("none", "bf16", None): count * 2,
    }.items():
        assert sum(Built(format_for(*options), source, [Q], tmp_path).bytes.values()) == wanted, options


def held(factory: Factory, names: list[str], width: int) -> Held:
    return factory(Constants()).held(names, width)  # type: ignore[attr-defined, no-any-return]


def test_a_group_that_does_not_divide_the_inputs_is_cut_to_what_does() -> None:
    assert held(format_for("int8", group=128), [Q], 576) == Held("i8", 64)
    assert held(format_for("int4", group=64), [Q], 96) == Held("u4", 32)
    assert held(format_for("int8", group=32), [Q], 100) == Held("i8", 0)
    assert held(format_for("int4"), [Q], 100) == Held("i8", 0)
    assert held(format_for("keep", stored={V: BLOCK_TYPES["Q8_0"].form}), [Q], 100) == Held("i8", 0)


def test_embedding_and_head_stay_in_eight_bits_at_int4_unless_requested_or_stored_in_four() -> None:
    for name in (EMBEDDING, HEAD):
        assert held(format_for("int4"), [name], 64) == Held("i8", 32)
        assert held(format_for("int4", stored={name: BLOCK_TYPES["Q4_0"].form}), [name], 64) == Held("u4", 32)
        assert held(format_for("int4", stored={name: BLOCK_TYPES["Q8_0"].form}), [name], 64) == Held("i8", 32)
        assert held(format_for("int4", lm_head_bits=4), [name], 64) == Held("u4", 32)


def test_what_a_bound_widens_is_in_eight_bits_with_what_it_is_fused_with() -> None:
    wide = format_for("int4", wide={V})
    assert held(wide, [V], 64) == held(wide, [Q, V], 64) == Held("i8", 32)
    assert held(wide, [Q], 64) == Held("u4", 32)


def test_what_keep_does_not_find_in_blocks_is_in_eight_bits() -> None:
    keep = format_for("keep", stored={Q: BLOCK_TYPES["Q4_1"].form, EMBEDDING: BLOCK_TYPES["Q8_0"].form})
    assert [held(keep, [n], 64).family for n in (Q, EMBEDDING, V)] == ["u4kept", "i8kept", "i8"]


@pytest.mark.parametrize("quantize", [q for q in GROUPS if q != "keep"])
def test_a_matrix_that_is_used_twice_is_declared_once(quantize: str) -> None:
    constants = Constants()
    built = format_for(quantize)(constants)
    built.matrix([HEAD], [(ROWS, WIDTH)])
    count = len(constants.recipes)
    built.matrix([HEAD], [(ROWS, WIDTH)])
    assert len(constants.recipes) == count


def test_vectors_stay_float32() -> None:
    for factory in (WeightFormat, lambda c: Half(c, "bf16"), format_for("int4")):
        constants = Constants()
        factory(constants).concatenated(["a", "b"], [(4,), (8,)])
        factory(constants).vector("norm", (4,))
        assert [r.transform for r in constants.recipes] == ["dense", "dense"]


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        (("int8", "f16"), r"--quantize int8 with --dtype f16; it offers none with f32, bf16, f16; int8 with f32, bf16"),
        (("fp8", "f32"), r"--quantize fp8 with --dtype f32; it offers none with"),
        (("int4", "f32", 0), r"int4 in groups of 0; it offers int8 in groups of 0, 32, 64, 128; int4 in groups of 32"),
        (("none", "f32", 32), r"none in groups of 32; it offers int8 in groups"),
    ],
)
def test_a_combination_that_is_not_offered_lists_those_that_are(requested: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        format_for(*requested)


def test_float32_throughout_quantises_nothing() -> None:
    assert properties("none") == {
        "INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
    }  # fmt: skip


def test_smaller_formats_quantise_activations_and_the_cache_unless_reported_otherwise() -> None:
    assert properties("int8", "bf16") == {
        "INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "u8", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "32",
    }  # fmt: skip
    assert properties("int8", cache="f32", activations=16)["DYNAMIC_QUANTIZATION_GROUP_SIZE"] == "16"
    assert properties("int8", cache="f32")["KV_CACHE_PRECISION"] == "f32"


@pytest.mark.parametrize(("dtype", "cache"), [("f32", "bf16"), ("bf16", "f32"), ("f32", "f16"), ("f32", "u4")])
def test_a_cache_that_attention_cannot_read_is_refused_with_what_it_can(dtype: str, cache: str) -> None:
    with pytest.raises(InputError, match=rf"attention in {dtype} reads no KV cache in {cache}; with .* it reads u8, "):
        properties("none", dtype, cache)


@pytest.mark.parametrize(
    ("dtype", "isa"),
    [("f32", ()), ("bf16", ("avx512f", "avx512_bf16")), ("bf16", ("avx2", "avx_ne_convert")), ("f16", ("asimdhp",))],
)
def test_a_precision_that_the_cpu_has_is_taken(dtype: str, isa: tuple[str, ...]) -> None:
    require_precision(dtype, isa)


def test_a_precision_that_the_cpu_lacks_is_refused_with_what_would_work() -> None:
    with pytest.raises(DeviceError, match=r"--dtype bf16: this CPU has none of avx512_bf16, .*; choose one of f32, or"):
        require_precision("bf16", ("x86_64", "avx2", "avx512f"))
    with pytest.raises(
        DeviceError, match=r"--dtype f16: this CPU has none of avx512_fp16, .*; choose one of f32, bf16, or"
    ):
        require_precision("f16", ("x86_64", "avx512f", "avx512_bf16"))
