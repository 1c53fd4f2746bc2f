"""Every format: tensors are those of the model that its numbers stand for, to the bit, whole and in blocks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.checkpoint.quantised.integers import unpack
from llmc.compiler.frontend.consumed import require_consumed
from llmc.compiler.frontend.real_model import load_real_model
from llmc.errors import CheckpointError
from tests.compiler import tiny
from tests.compiler.checkpoint.quantised import packers
from tests.tiers import default_cases


@default_cases(9)
@pytest.mark.parametrize("case", list(packers.CASES))
def test_a_folder_is_the_float_model_that_its_quantized_weights_stand_for(case: str, tmp_path: Path) -> None:
    values = packers.write(tmp_path, *packers.CASES[case])
    checkpoint = open_checkpoint(tmp_path)
    require_consumed(checkpoint)
    assert checkpoint.tensor_names() == sorted(values)
    assert "quantization_config" not in checkpoint.config
    for name, wanted in values.items():
        assert checkpoint.shape(name) == wanted.shape
        np.testing.assert_array_equal(checkpoint.tensor(name), wanted)
    for name, held in load_real_model(checkpoint).state_dict().items():
        assert torch.equal(held, torch.from_numpy(values[name])), name


@default_cases(9)
@pytest.mark.parametrize("case", list(packers.CASES))
def test_blocks_are_the_same_values_in_the_form_that_was_said_before_they_were_read(case: str, tmp_path: Path) -> None:
    values = packers.write(tmp_path, *packers.CASES[case])
    checkpoint = open_checkpoint(tmp_path)
    for name, wanted in values.items():
        form, blocks, why = checkpoint.stored_form(name), checkpoint.quantised_blocks(name), checkpoint.unkept(name)
        assert (form is None) == (blocks is None)
        if form is None or blocks is None:
            quantised = name.split(".")[-2] in packers.PROJECTIONS and case != "gptq dynamic"
            assert bool(why) == quantised
            continue
        assert why is None and case in packers.EXACT
        assert (form.type, form.bits, form.block) == (blocks.type, blocks.bits, blocks.block)
        centred = isinstance(blocks.zero_point, int) and blocks.zero_point == 1 << (form.bits - 1)
        assert form.offsets == ("" if centred else "zeros")
        for size in (form.block, 16):
            np.testing.assert_array_equal(blocks.cut(size).dequantise(), wanted)


@pytest.mark.parametrize("case", ["gptq act-order", "pack-quantized act-order"])
def test_inputs_in_the_order_of_groups_have_blocks(case: str, tmp_path: Path) -> None:
    values = packers.write(tmp_path, *packers.CASES[case])
    checkpoint = open_checkpoint(tmp_path)
    name = "model.layers.0.mlp.down_proj.weight"
    form, blocks = checkpoint.reordered_form(name), checkpoint.reordered_blocks(name)
    assert form is not None and blocks is not None and sorted(form.order) == list(range(values[name].shape[1]))
    assert (form.bits, form.block) == (blocks.bits, blocks.block) == (4, 32)
    np.testing.assert_array_equal(blocks.dequantise(), values[name][:, list(form.order)])
    plain = "model.norm.weight"
    assert checkpoint.reordered_form(plain) is None is checkpoint.reordered_blocks(plain)


def test_groups_of_different_sizes_have_no_blocks_in_any_order(tmp_path: Path) -> None:
    def uneven(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        name = "model.layers.0.mlp.down_proj.g_idx"
        order = tensors[name].clone()
        order[order.argmin()] = order.max()
        return {**tensors, name: order}

    packers.write(tmp_path, *packers.CASES["gptq act-order"], change=uneven)
    checkpoint, name = open_checkpoint(tmp_path), "model.layers.0.mlp.down_proj.weight"
    assert checkpoint.reordered_form(name) is None is checkpoint.reordered_blocks(name)
    assert checkpoint.unkept(name) == "gptq with act-order" and np.isfinite(checkpoint.tensor(name)).all()


def test_each_format_says_why_what_is_no_blocks_is_none(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    for case, why in {
        "gptq act-order": "gptq with act-order", "fp8 in tiles": "float8", "float-quantized by tensor": "float8",
    }.items():  # fmt: skip
        packers.write(tmp_path / case, *packers.CASES[case])
        assert open_checkpoint(tmp_path / case).unkept(name) == why


def test_what_is_stated_of_activations_is_left_out_with_a_notice(tmp_path: Path) -> None:
    for case in ("int-quantized by channel", "fp8 in tiles", "fp8 by tensor"):
        packers.write(tmp_path / case, *packers.CASES[case])
        (notice,) = open_checkpoint(tmp_path / case).notices
        assert "quantization_config's settings of activations are ignored" in notice
    packers.write(tmp_path / "none", *packers.CASES["awq groups of 32"])
    assert not open_checkpoint(tmp_path / "none").notices


EXPERTS = {
    **{case: packers.CASES[case] for case in ("nvfp4-pack-quantized", "fp8 in tiles")},
    "gptq": (packers.gptq_config(4, 16, sym=False), packers.gptq(4, 16, symmetric=False)),
    "awq": (packers.awq_config(16), packers.awq(16)),
}


@pytest.mark.parametrize("case", EXPERTS)
def test_experts_in_parts_are_one_tensor_and_its_blocks(case: str, tmp_path: Path) -> None:
    values = packers.write(tmp_path, *EXPERTS[case], case="qwen3_moe")
    checkpoint = open_checkpoint(tmp_path)
    require_consumed(checkpoint)
    prefix = "model.layers.0.mlp.experts"
    for name, parts in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
        merged = checkpoint.tensor(f"{prefix}.{name}")
        wanted = [[values[f"{prefix}.{e}.{part}_proj.weight"] for part in parts] for e in range(len(merged))]
        np.testing.assert_array_equal(merged, np.concatenate([w for ws in wanted for w in ws]).reshape(merged.shape))
        form, blocks = checkpoint.stored_form(f"{prefix}.{name}"), checkpoint.quantised_blocks(f"{prefix}.{name}")
        assert checkpoint.unkept(f"{prefix}.{name}") == ("float8" if case.startswith("fp8") else None)
        if case.startswith("fp8"):
            assert form is blocks is None
            continue
        assert form is not None and blocks is not None and (form.bits, form.block) == (blocks.bits, blocks.block)
        np.testing.assert_array_equal(blocks.dequantise().reshape(merged.shape), merged)
        for one, matrix in zip(blocks.apart(), merged, strict=True):
            np.testing.assert_array_equal(one.dequantise(), matrix)
    attention = "model.layers.0.self_attn.q_proj.weight"
    assert (checkpoint.stored_form(attention) is None) == case.startswith("fp8")
    np.testing.assert_array_equal(checkpoint.tensor(attention), values[attention])


def test_experts_whose_parts_differ_in_form_are_floats_with_the_reason(tmp_path: Path) -> None:
    pack = {"gate_proj": packers.gptq(4, 16), "up_proj": packers.gptq(8, 16), "down_proj": packers.gptq(4, 16)}
    stated = packers.gptq_config(4, 16, dynamic={"+:.*up_proj": {"bits": 8}})
    values = packers.write(tmp_path, stated, pack, case="qwen3_moe")
    checkpoint, prefix = open_checkpoint(tmp_path), "model.layers.0.mlp.experts"
    name = f"{prefix}.gate_up_proj"
    assert checkpoint.stored_form(name) is None is checkpoint.quantised_blocks(name)
    assert checkpoint.unkept(name) == "experts in different forms"
    parts = [values[f"{prefix}.3.{part}_proj.weight"] for part in ("gate", "up")]
    np.testing.assert_array_equal(checkpoint.tensor(name)[3], np.concatenate(parts))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_zero_point_of_0_comes_back_whatever_its_neighbours_are(bits: int, tmp_path: Path) -> None:
    """gptq's version 1 stores zero points less one: of whole words, or of each with 3 bits."""

    def pack(weight: packers.Array) -> packers.Packed:
        raised = weight.copy()
        raised[::3] = np.abs(raised[::3])
        return packers.gptq(bits, symmetric=False)(raised)

    values = packers.write(tmp_path, packers.gptq_config(bits, sym=False), pack)
    checkpoint = open_checkpoint(tmp_path)
    for name, wanted in values.items():
        np.testing.assert_array_equal(checkpoint.tensor(name), wanted)


def test_a_configuration_alone_is_that_of_the_float_model(tmp_path: Path) -> None:
    packers.write(tmp_path, *packers.CASES["awq groups of 32"])
    alone = open_checkpoint(tmp_path / "config.json")
    assert alone.config == open_checkpoint(tmp_path).config
    require_consumed(alone)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "other.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "hqq"}}))
    with pytest.raises(CheckpointError, match=r"quantization_config: \{'quant_method': 'hqq'\}, which nothing reads"):
        require_consumed(open_checkpoint(tmp_path / "other.json"))


@pytest.mark.parametrize("bits", [3, 4])
def test_gptq_of_weights_that_the_model_has_turned_is_read_to_the_bit(bits: int, tmp_path: Path) -> None:
    path = tiny.write_model(tmp_path, "gpt2") / "model.safetensors"
    built, wanted = dict[str, Tensor](), dict[str, np.ndarray]()
    for name, tensor in load_file(path).items():
        module = name.removesuffix(".weight")
        if not name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
            built[name] = tensor
            continue
        packed = packers.gptq(bits, 32, symmetric=False)(tensor.numpy().astype(np.float64).T)
        built |= {f"{module}.{part}": t.contiguous() for part, t in packed.tensors.items()}
        wanted[name] = packed.values.astype(np.float32).T
    save_file(built, path, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    stated = {"quant_method": "gptq", "bits": bits, "group_size": 32}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": stated}))
    found = open_checkpoint(tmp_path)
    assert len(wanted) == 8
    for name, values in wanted.items():
        np.testing.assert_array_equal(found.tensor(name), values)
        assert (found.shape(name), found.stored_form(name)) == (values.shape, None)
        assert found.unkept(name) == "gptq of weights [in, out]"


def test_three_bits_are_read_as_gptqmodel_packs_them() -> None:
    """Ten codes, one across words, ten, one across words, ten: 32 codes in three words (GPTQModel, _pack_rows_3)."""
    quantized = np.random.default_rng(0).integers(0, 8, 32).astype(np.uint64)
    first = sum(int(c) << 3 * i for i, c in enumerate(quantized[:10])) | int(quantized[10] & 3) << 30
    second = int(quantized[10] >> 2) | int(quantized[21] & 1) << 31
    second |= sum(int(c) << 3 * i + 1 for i, c in enumerate(quantized[11:21]))
    third = int(quantized[21] >> 1) | sum(int(c) << 3 * i + 2 for i, c in enumerate(quantized[22:]))
    words = np.array([[first, second, third]], np.uint32)
    np.testing.assert_array_equal(unpack(words, 3, 32)[0], quantized)
