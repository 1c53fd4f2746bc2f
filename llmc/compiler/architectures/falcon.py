"""Falcon: attention and MLP side by side, one head of keys and values or groups of heads, rotated or ALiBi."""

from __future__ import annotations

from typing import Any

from llmc.compiler.architectures.shared.base import Config, Family
from llmc.compiler.architectures.shared.names import Names, with_biases
from llmc.compiler.architectures.shared.sharding import rules
from llmc.compiler.architectures.shared.size import ModelSize

NAMES = Names(
    "transformer.h", "transformer.word_embeddings.weight", others=lambda config: with_biases("transformer.ln_f")
)
LINEAR = ("self_attention.query_key_value", "self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")

POSITIONS = 2048
"""Those of a model with ALiBi that does not say how many: transformers' default."""


def _layer(config: Config) -> list[str]:
    linear = with_biases(*LINEAR) if config.get("bias") else [f"{name}.weight" for name in LINEAR]
    return linear + with_biases(*_norms(config))


def _norms(config: Config) -> list[str]:
    if not config.get("parallel_attn", True):
        return ["input_layernorm", "post_attention_layernorm"]
    norms = config.get("num_ln_in_parallel_attn") or (2 if config.get("new_decoder_architecture") else 1)
    return ["ln_attn", "ln_mlp"] if norms == 2 else ["input_layernorm"]


def _derived(config: Config) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    if config.get("new_decoder_architecture"):
        groups = config.get("num_kv_heads") or heads
    else:
        groups = 1 if config.get("multi_query", True) else heads
    return {
        "num_key_value_heads": groups,
        "intermediate_size": config.get("ffn_hidden_size") or 4 * config["hidden_size"],
        "tie_word_embeddings": config.get("tie_word_embeddings", True),
        "max_position_embeddings": config.get("max_position_embeddings", POSITIONS if config.get("alibi") else None),
    }


FAMILY = Family(
    model_class="FalconForCausalLM",
    layer=_layer,
    names=NAMES,
    computed=(".self_attention.rotary_emb.inv_freq",),
    derived=_derived,
    unread=frozenset({"head_dim", "hidden_act", "rms_norm_eps", "intermediate_size", "num_key_value_heads"}),
    reads=frozenset({
        "num_ln_in_parallel_attn", "layer_norm_epsilon", "num_kv_heads", "new_decoder_architecture", "multi_query",
        "parallel_attn", "bias", "ffn_hidden_size", "activation", "alibi",
    }),
    allows={"apply_residual_connection_post_layernorm": (False,)},
    harmless=frozenset({"ff_factor"}),
    sharding=rules(NAMES, output=r"self_attention\.dense", up=r"mlp\.dense_h_to_4h", down=r"mlp\.dense_4h_to_h"),
    size=ModelSize.ungated,
    tiny={
        "hidden_size": 64, "ffn_hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_kv_heads": 2,
        "max_position_embeddings": 128, "new_decoder_architecture": True, "layer_norm_epsilon": 1e-5,
    },
)  # fmt: skip
