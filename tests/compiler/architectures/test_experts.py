"""Sizes of models of experts: all of them, and what one token reads; experts count as held in full precision."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmc.compiler.architectures.shared.architectures import size_of
from llmc.compiler.architectures.shared.caches import cache_of
from llmc.compiler.architectures.shared.experts import ExpertsSize
from llmc.compiler.architectures.shared.size import Weights
from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.frontend.consumed import require_consumed, tensor_names
from llmc.compiler.frontend.skeleton import build_skeleton
from llmc.compiler.model_size import weights_of
from llmc.compiler.options import CompileOptions
from llmc.compiler.targets.onnxruntime.target import OnnxRuntimeTarget
from llmc.errors import CheckpointError
from tests.compiler import tiny

MIXTRAL_8X7B = {
    "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8,
    "num_experts_per_tok": 2,
}  # fmt: skip
EXPERTS_OF_TINY = 2 * 8 * 3 * 64 * 96


def test_a_token_reads_two_experts_of_eight() -> None:
    size = size_of(MIXTRAL_8X7B, "config.json")
    assert isinstance(size, ExpertsSize)
    one = 32 * 3 * 4096 * 14336
    assert size.parameters - size.active_parameters == 6 * one
    assert size.parameters == pytest.approx(46.7e9, rel=2e-3)
    assert size.active_parameters == pytest.approx(12.9e9, rel=2e-3)
    assert size.intermediate == 2 * 14336


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"num_experts_per_tok": 9}, r"config\.json: num_experts_per_tok is 9, but num_local_experts is only 8"),
        ({"num_local_experts": None}, r"config\.json: num_local_experts is None, not a size"),
        ({"num_experts_per_tok": 0}, r"config\.json: num_experts_per_tok is 0, not a size"),
    ],
)
def test_numbers_of_experts_that_cannot_be_are_refused(changed: dict[str, object], why: str) -> None:
    with pytest.raises(CheckpointError, match=why):
        size_of(MIXTRAL_8X7B | changed, "config.json")


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    path = tiny.write_model(tmp_path / "model", "glm4_moe")
    further, beyond = (f"model.layers.{i}.eh_proj.weight" for i in (2, 3))
    tensors = load_file(path / "model.safetensors")
    config = json.loads((path / "config.json").read_text()) | {"num_mtp_layers": 1}
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors | {further: torch.zeros(1)}, path / "model.safetensors")
    require_consumed(open_checkpoint(path))
    save_file(tensors | {beyond: torch.zeros(1)}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"takes the tensors {re.escape(beyond)}"):
        require_consumed(open_checkpoint(path))


@pytest.mark.parametrize(
    ("name", "changed", "dense"),
    [
        ("qwen3_moe", {"num_hidden_layers": 6, "mlp_only_layers": [1], "decoder_sparse_step": 2}, {0, 1, 2, 4}),
        ("glm4_moe", {"num_hidden_layers": 4, "first_k_dense_replace": 3}, {0, 1, 2}),
        ("ernie4_5_moe", {
            "num_hidden_layers": 7, "moe_layer_start_index": 1, "moe_layer_end_index": 4, "moe_layer_interval": 2,
        }, {0, 2, 4, 5, 6}),
    ],
)  # fmt: skip
def test_layers_without_experts_are_those_that_transformers_builds(
    name: str, changed: dict[str, object], dense: set[int]
) -> None:
    config = tiny.config(name) | changed
    named = dict(build_skeleton(config).named_parameters())
    assert tensor_names(config) == set(named)
    sparse = {int(tensor.split(".")[2]) for tensor in named if ".mlp.experts." in tensor}
    assert sparse == set(range(config["num_hidden_layers"])) - dense
    matrices = sum(p.numel() for n, p in named.items() if p.dim() >= 2)
    assert size_of(config, name).parameters == matrices


def test_experts_of_a_checkpoint_are_counted_apart(tmp_path: Path) -> None:
    held = weights_of(open_checkpoint(tiny.write_model(tmp_path / "model", "mixtral")))
    assert [w.count for w in held if w.experts] == [EXPERTS_OF_TINY]
    assert [w.count for w in size_of(tiny.config("mixtral"), "it").weights if w.experts] == [EXPERTS_OF_TINY]


def test_experts_are_not_estimated_as_quantised() -> None:
    options = CompileOptions("onnxruntime", quantize="int8", dtype="f32")
    assert OnnxRuntimeTarget().costs.weight_bits(options, Weights(1, experts=True)) == 32
    assert OnnxRuntimeTarget().costs.weight_bits(options, Weights(1)) < 32


@pytest.mark.parametrize(("used", "window"), [(False, None), (True, 7)])
def test_qwen3s_layers_have_a_window_only_where_it_is_used(used: bool, window: int | None) -> None:
    shape = cache_of(tiny.config("qwen3_moe") | {"sliding_window": 7, "use_sliding_window": used})
    assert [{t.window for t in shape.of_layer(i)} for i in range(2)] == [{window}] * 2
