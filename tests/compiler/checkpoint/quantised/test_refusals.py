"""What is not read, or contradicts itself, is one error that says what and where, when a folder is opened or read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.frontend.consumed import require_consumed
from llmc.errors import CheckpointError
from tests.compiler import tiny
from tests.compiler.checkpoint.quantised import packers
from tests.tiers import default_cases, examples

Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]
AT = "model.layers.0.mlp.down_proj"


def without(part: str) -> Change:
    return lambda held: {name: tensor for name, tensor in held.items() if name != f"{AT}.{part}"}


def changed(part: str, change: Callable[[Tensor], Tensor]) -> Change:
    return lambda held: {**held, f"{AT}.{part}": change(held[f"{AT}.{part}"])}


def filled(part: str, value: float) -> Change:
    def fill(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[7 % tensor.numel()] = value
        return tensor

    return changed(part, fill)


def refusal(folder: Path, case: str, change: Change = dict, **stated: Any) -> str:
    config, pack = packers.CASES[case]
    packers.write(folder, {**config, **stated}, pack, change=change)
    with pytest.raises(CheckpointError) as refused:
        checkpoint = open_checkpoint(folder)
        for name in checkpoint.tensor_names():
            checkpoint.tensor(name)
    message = str(refused.value)
    assert str(folder) in message and "\n" not in message
    return message


GPTQ, AWQ, PACKED = "gptq 4 bits, groups of 32", "awq groups of 32", "pack-quantized 4 bits"
ZEROS = "pack-quantized 4 bits, groups of 64, zero points"
BYTES, NVFP4, TILES = "int-quantized by channel", "nvfp4-pack-quantized", "fp8 in tiles"
SCALES = {GPTQ: "scales", AWQ: "scales", PACKED: "weight_scale", BYTES: "weight_scale", TILES: "weight_scale_inv"}
QUANTIZED = {GPTQ: "qweight", AWQ: "qweight", PACKED: "weight_packed", NVFP4: "weight_packed"}


@pytest.mark.parametrize("case", list(SCALES))
def test_scales_that_are_no_numbers(case: str, tmp_path: Path) -> None:
    message = refusal(tmp_path, case, filled(SCALES[case], float("nan")))
    assert f"tensor {AT}.{SCALES[case]} holds a non-finite value (nan at [" in message


def test_scales_that_become_none(tmp_path: Path) -> None:
    zero = filled("weight_global_scale", 0.0)
    assert "down_proj.weight (scales) holds a non-finite value" in refusal(tmp_path / "zero", NVFP4, zero)
    code = changed("weight", lambda t: torch.full_like(t.view(torch.uint8), 0x7F).view(torch.float8_e4m3fn))
    assert "down_proj.weight holds a non-finite value" in refusal(tmp_path / "code", TILES, code)


@pytest.mark.parametrize("case", list(SCALES))
def test_scales_that_are_missing(case: str, tmp_path: Path) -> None:
    message = refusal(tmp_path, case, without(SCALES[case]))
    assert "fetch" in message and "down_proj" in message


@pytest.mark.parametrize(
    ("case", "part"), [(GPTQ, "qzeros"), (AWQ, "qzeros"), (ZEROS, "weight_zero_point"), (PACKED, "weight_shape")]
)
def test_zero_points_and_shapes_that_are_missing(case: str, part: str, tmp_path: Path) -> None:
    assert f"has no {AT}.{part}: fetch the checkpoint again" in refusal(tmp_path, case, without(part))


@pytest.mark.parametrize("case", list(QUANTIZED))
def test_quantized_weights_of_another_type(case: str, tmp_path: Path) -> None:
    message = refusal(tmp_path, case, changed(QUANTIZED[case], lambda t: t.long()))
    wanted = "U8" if case == NVFP4 else "I32"
    assert f"tensor {AT}.{QUANTIZED[case]} has type I64, not {wanted} as its format requires" in message


@pytest.mark.parametrize(
    ("case", "stated"),
    [
        (GPTQ, {"bits": 8}), (GPTQ, {"group_size": 64}), (GPTQ, {"group_size": -1}), (AWQ, {"group_size": 64}),
        (PACKED, packers.scheme("pack-quantized", packers.whole(8, 32))),
        (PACKED, packers.scheme("pack-quantized", packers.whole(4, 64))),
        (TILES, {"weight_block_size": [128, 128]}),
    ],
)  # fmt: skip
def test_shapes_that_are_not_those_of_the_stated_bits_and_groups(
    case: str, stated: Mapping[str, Any], tmp_path: Path
) -> None:
    assert "and quantization_config say: config.json is of another model" in refusal(tmp_path, case, **stated)


@default_cases(8)
@pytest.mark.parametrize(
    ("case", "stated", "why"),
    [
        (GPTQ, {"group_size": 48}, "inputs, which groups of 48 do not divide"),
        (AWQ, {"group_size": 48}, "inputs, which groups of 48 do not divide"),
        (PACKED, packers.scheme("pack-quantized", packers.whole(4, 48)), "inputs, which groups of 48 do not divide"),
        (GPTQ, {"group_size": 0}, "group_size is 0, not a number of inputs or -1"),
        (GPTQ, {"group_size": None}, "group_size is None, not a number"),
        (GPTQ, {"bits": 5}, "bits is 5; llmc reads 2, 3, 4, 8"),
        (GPTQ, {"bits": True}, "bits is True; llmc reads"),
        (AWQ, {"bits": 8}, "bits is 8; llmc reads 4"),
        (GPTQ, {"checkpoint_format": "marlin"}, "gptq format 'marlin' is not supported; supported: gptq, gptq_v2"),
        (GPTQ, {"dynamic": {"+:(": {}}}, "dynamic has '+:('"),
        (GPTQ, {"dynamic": {"+:.*": 7}}, "dynamic is {'+:.*': 7}, not objects by pattern"),
        (PACKED, {"ignore": ["re:("]}, "target 're:('"),
        (GPTQ, {"dynamic": {"-:.*down_proj": {}}}, f"{AT}.qweight is quantized, but dynamic says"),
        (AWQ, {"version": "GEMV"}, "awq version 'gemv' is not supported; supported: gemm"),
        (AWQ, {"backend": "llm-awq"}, "awq version 'llm-awq' is not supported"),
        (TILES, {"weight_block_size": [128]}, "weight_block_size is [128], not two sizes"),
        (PACKED, {"format": "marlin-24"}, "format 'marlin-24' is not supported; supported: float-quantized, int-"),
        (PACKED, {"config_groups": {}}, "needs config_groups"),
        (PACKED, {"config_groups": {"g": {"targets": "Linear"}}}, "group 'g' has no weights or targets"),
        (PACKED, {"ignore": ["re:.*mlp.*"]}, "is quantized, but quantization_config says to ignore it"),
        (PACKED, {"transform_config": {"config_groups": {}}}, "transform_config is {'config_groups': {}}"),
        (PACKED, {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is"),
        (
            PACKED, {"config_groups": {"g": {"targets": ["re:.*q_proj"], "weights": packers.whole(4, 32)}}},
            "is quantized, but no group of quantization_config covers it",
        ),
    ],
)  # fmt: skip
def test_what_is_stated_and_not_read(case: str, stated: Mapping[str, Any], why: str, tmp_path: Path) -> None:
    assert why in refusal(tmp_path, case, **stated)


@pytest.mark.parametrize(("group", "why"), [(8, "names group 8, but groups are 0 to 7"), (-1, "names group -1")])
def test_inputs_of_a_group_that_there_is_not(group: int, why: str, tmp_path: Path) -> None:
    assert f"{AT}.g_idx {why}" in refusal(tmp_path, GPTQ, filled("g_idx", group))


def test_act_order_without_an_order(tmp_path: Path) -> None:
    assert f"has no {AT}.g_idx" in refusal(tmp_path, "gptq act-order", without("g_idx"))


def test_packed_shapes_that_are_damaged(tmp_path: Path) -> None:
    cut = changed("qweight", lambda t: t[:-1])
    assert "inputs, which groups of 32 do not divide" in refusal(tmp_path / "gptq", GPTQ, cut)
    none = changed("weight_shape", lambda t: torch.tensor([0, 256]))
    assert "weight_shape says [0, 256], not the shape of a matrix" in refusal(tmp_path / "none", PACKED, none)
    vast = changed("weight_shape", lambda t: torch.tensor([1 << 62, 256]))
    assert "config.json is of another model" in refusal(tmp_path / "vast", PACKED, vast)
    for case, part in ((AWQ, "qweight"), (BYTES, "weight"), (TILES, "weight"), (NVFP4, "weight_packed")):
        flat = changed(part, lambda t: t.reshape(-1))
        assert "down_proj" in refusal(tmp_path / part / case[:3], case, flat)


def test_methods_that_are_not_read_are_named_with_those_that_are(tmp_path: Path) -> None:
    for method in ("hqq", "quanto", None, 7, ["gptq"]):
        message = refusal(tmp_path / str(method), GPTQ, quant_method=method)
        assert (
            f"quant_method {str(method)!r} is not supported; llmc reads awq, compressed-tensors, fp8, gptq, mxfp4"
            in message
        )
        assert "--quantize" in message


def test_bitsandbytes_is_refused_with_the_way_to_convert(tmp_path: Path) -> None:
    message = refusal(tmp_path, GPTQ, quant_method="bitsandbytes")
    assert "quant_method 'bitsandbytes' is not supported" in message
    assert "m.dequantize().save_pretrained(…)" in message


def test_a_method_without_one_tensor_of_its_own(tmp_path: Path) -> None:
    for case in (GPTQ, AWQ, PACKED, TILES):
        folder = tmp_path / case
        packers.write(folder, packers.CASES[case][0], {})
        with pytest.raises(CheckpointError, match=r"quantization_config says .*, but no tensor "):
            open_checkpoint(folder)


def test_pickled_weights(tmp_path: Path) -> None:
    packers.write(tmp_path, *packers.CASES[GPTQ])
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin holds pickled weights, which llmc does not load"):
        open_checkpoint(tmp_path)


def test_quantized_weights_without_a_word_of_them_in_the_configuration(tmp_path: Path) -> None:
    packers.write(tmp_path, *packers.CASES[GPTQ], case=tiny.WIDE)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": None}))
    with pytest.raises(CheckpointError, match=r"takes the tensors .*down_proj.g_idx"):
        require_consumed(open_checkpoint(tmp_path))


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 300) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def members(stated: Any) -> list[tuple[Any, Any]]:
    """Every object in quantization_config, with each of its keys."""
    found = []
    if isinstance(stated, dict):
        found += [(stated, key) for key in stated]
        for inner in stated.values():
            found += members(inner)
    return found


@default_cases(3)
@pytest.mark.parametrize("case", [GPTQ, "gptq dynamic", AWQ, ZEROS, BYTES, NVFP4, TILES])
def test_any_json_in_the_place_of_what_is_stated_is_read_or_refused(case: str, tmp_path: Path) -> None:
    packers.write(tmp_path, *packers.CASES[case])
    config = json.loads((tmp_path / "config.json").read_text())

    @examples(60)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        stated = json.loads(json.dumps(packers.CASES[case][0]))
        within, key = data.draw(st.sampled_from(members(stated)))
        within[key] = data.draw(ANYTHING)
        (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": stated}))
        try:
            checkpoint = open_checkpoint(tmp_path)
            for name in checkpoint.tensor_names():
                checkpoint.stored_form(name)
        except CheckpointError as error:
            assert str(tmp_path) in str(error)

    check()
