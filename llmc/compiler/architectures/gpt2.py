"""GPT-2: learned positions, LayerNorm, weights [in, out] (transformers' Conv1D), queries, keys and values in one."""

from __future__ import annotations

from llmc.compiler.architectures.shared import gpt
from llmc.compiler.architectures.shared.base import Family
from llmc.compiler.architectures.shared.names import with_biases
from llmc.compiler.architectures.shared.sharding import rules

FAMILY = Family(
    model_class="GPT2LMHeadModel",
    layer=lambda config: with_biases(*gpt.PARTS),
    names=gpt.NAMES,
    computed=(".attn.bias", ".attn.masked_bias"),
    keys=gpt.KEYS,
    turned=frozenset({"c_attn", "c_proj", "c_fc"}),
    derived=gpt.derived,
    unread=gpt.UNREAD,
    reads=frozenset({
        "n_inner", "activation_function", "layer_norm_epsilon", "scale_attn_weights",
        "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn",
    }),
    harmless=gpt.SUMMARY | {"n_ctx"},
    sharding=rules(gpt.NAMES),
    size=gpt.size,
    tiny={
        "n_embd": 64, "n_inner": 96, "n_layer": 2, "n_head": 4, "n_positions": 128, "layer_norm_epsilon": 1e-5,
        "scale_attn_by_inverse_layer_idx": True,
    },
)  # fmt: skip
