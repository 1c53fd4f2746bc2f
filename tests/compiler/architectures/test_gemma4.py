"""Gemma 4: layers that read the keys and values of earlier ones, and sizes that differ by layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmc.compiler.architectures.shared.architectures import architecture
from llmc.compiler.architectures.shared.caches import cache_of
from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.frontend.attention import TraceState
from llmc.compiler.frontend.consumed import require_consumed
from llmc.compiler.frontend.skeleton import build_skeleton, model_config
from llmc.compiler.frontend.trace import trace
from llmc.compiler.program.fuse import fuse
from llmc.compiler.program.import_fx import import_program
from llmc.errors import CheckpointError
from llmc.runtime.cache_shape import CacheShape, key_value
from tests.compiler import tiny
from tests.tiers import full

TINY = tiny.of_architecture("gemma4_text")
PLAIN = {**TINY, "enable_moe_block": False, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
CASES = {"all": TINY, "plain": PLAIN, "own values": {**TINY, "attention_k_eq_v": False}}


@pytest.mark.parametrize("config", CASES.values(), ids=CASES)
def test_parameters_are_those_of_transformers_matrices(config: dict[str, Any]) -> None:
    matrices = sum(p.numel() for p in build_skeleton(config).parameters() if p.dim() > 1)
    assert architecture(config).size(config, "config.json").parameters == matrices


def test_a_configuration_that_transformers_saved_has_the_same_cache() -> None:
    saved = json.loads(model_config(TINY).to_json_string())
    assert "per_layer_config" in saved and "global_head_dim" not in saved
    assert cache_of(saved) == cache_of(TINY)
    assert [(t.layer, t.shape, t.window) for t in cache_of(TINY) if t.name == "key"] == [
        (0, (2, 16), 5), (1, (1, 32), None),
    ]  # fmt: skip


def test_a_size_of_a_layer_that_nothing_reads_is_refused() -> None:
    config = {**TINY, "per_layer_config": {"01": {"head_dim": 32, "sliding_window": 3}}}
    with pytest.raises(CheckpointError, match="per_layer_config says sliding_window, which no layer reads"):
        cache_of(config)


def test_keys_that_a_checkpoint_has_for_layers_that_read_others_are_left_out(tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path / "model", "gemma4_text")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    more = torch.ones(32, 64)
    save_file({**tensors, "model.layers.2.self_attn.k_proj.weight": more}, path, {"format": "pt"})
    require_consumed(open_checkpoint(folder))
    save_file({**tensors, "model.layers.1.self_attn.v_proj.weight": more}, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"nothing .* takes the tensors model\.layers\.1\.self_attn\.v_proj"):
        require_consumed(open_checkpoint(folder))


@full
def test_many_layers_alike_are_traced_whole() -> None:
    """Each layer takes its own part of a token's second embedding, and the last ones read others' keys."""
    layers = 12
    types = ["sliding_attention"] * 3 + ["full_attention"]
    config = {
        **TINY, "num_hidden_layers": layers, "layer_types": types * 3, "num_kv_shared_layers": 5,
        "enable_moe_block": False,
    }  # fmt: skip
    exported = trace(config, "fused")
    called = [node for node in exported.graph.nodes if node.target is torch.ops.llmc.attention.default]
    past = [node.args[3].name for node in called]
    assert len(called) == layers
    assert past[7:] == [past[3], past[6], past[6], past[6], past[3]]
    assert len(set(past[:7])) == 7
    gqa = [node.inputs for node in fuse(import_program(exported, 128, cache_of(config))).nodes if node.op == "gqa"]
    for layer, owner in ((7, 3), (8, 6), (9, 6), (10, 6), (11, 3)):
        assert gqa[layer][0] is not gqa[owner][0]
        assert gqa[layer][1:8] == gqa[owner][1:8], "keys and values of the earlier layer, turned by the same tables"


def test_keys_of_no_layer_are_an_error() -> None:
    shape = CacheShape(2, key_value(0, 1, 4))
    lengths = torch.ones(1, dtype=torch.long)
    state = TraceState(lengths[:, None], lengths, lengths, shape, ())
    key, value = torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 4)
    assert state.owner(0, key, value) == 0
    assert state.owner(1, key, value) == 0
    with pytest.raises(ValueError, match="layer 1 attends to keys that are in no layer's cache"):
        state.owner(1, key.clone(), value)
