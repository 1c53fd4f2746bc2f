"""Experts that are tensors of their own are read as one tensor of all, as many as the configuration says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from llmc.compiler.checkpoint import open_checkpoint
from llmc.errors import CheckpointError
from tests.compiler import tiny

ARCHITECTURES = {
    "mixtral": "model.layers.0.block_sparse_moe.experts.3.w2.weight",
    "qwen3_moe": "model.layers.0.mlp.experts.3.down_proj.weight",
    "granitemoe": "model.layers.0.block_sparse_moe.output_linear.weight",
}
"""A tensor as each family's published checkpoints have it: that of expert 3, or of all."""


def write(folder: Path, name: str, change: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict) -> Path:
    tiny.write_model(folder, name)
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, {"format": "pt"})
    return folder


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tensors_are_those_of_the_model_however_they_are_stored(name: str, tmp_path: Path) -> None:
    written = write(tmp_path / "model", name)
    assert ARCHITECTURES[name] in load_file(written / "model.safetensors")
    found = open_checkpoint(written)
    wanted = tiny.model(name).state_dict()
    assert set(found.tensor_names()) == set(wanted)
    for tensor in found.tensor_names():
        assert found.shape(tensor) == tuple(wanted[tensor].shape)
        np.testing.assert_array_equal(found.tensor(tensor), wanted[tensor].numpy())


def test_experts_that_are_one_tensor_already_are_read_as_they_are(tmp_path: Path) -> None:
    wanted = {n: t.clone() for n, t in tiny.model("qwen3_moe").state_dict().items()}
    found = open_checkpoint(write(tmp_path / "model", "qwen3_moe", lambda _: wanted))
    name = "model.layers.1.mlp.experts.gate_up_proj"
    np.testing.assert_array_equal(found.tensor(name), wanted[name].numpy())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_another_number_of_experts_than_the_configuration_says_is_refused(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model", name) / "config.json"
    config = json.loads(path.read_text())
    key = next(key for key in ("num_experts", "num_local_experts") if key in config)
    path.write_text(json.dumps(config | {key: 6}))
    with pytest.raises(CheckpointError, match=r"has 8 experts, but .*num_.*experts in config.json says 6"):
        open_checkpoint(tmp_path / "model")


def test_a_missing_matrix_of_an_expert_is_named(tmp_path: Path) -> None:
    lost = "model.layers.0.mlp.experts.2.up_proj.weight"
    write(tmp_path / "model", "qwen3_moe", lambda held: {n: t for n, t in held.items() if n != lost})
    with pytest.raises(
        CheckpointError, match=r"experts are stored separately, and model\.layers\.0\.mlp\.experts\.2\.up_proj"
    ):
        open_checkpoint(tmp_path / "model")


def test_an_expert_of_another_shape_is_named(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.2.up_proj.weight"
    write(tmp_path / "model", "qwen3_moe", lambda held: held | {name: held[name][:7].clone()})
    with pytest.raises(CheckpointError, match=r"experts\.2\.up_proj\.weight is \[7, 64\], another expert's \[48, 64\]"):
        open_checkpoint(tmp_path / "model").tensor("model.layers.0.mlp.experts.gate_up_proj")
