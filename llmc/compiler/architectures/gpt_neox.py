"""GPT-NeoX (Pythia): attention and MLP read the same hidden states, a part of each head is rotated, all has biases."""

from __future__ import annotations

from typing import Any

from llmc.compiler.architectures.shared.base import Config, Family
from llmc.compiler.architectures.shared.names import Names, with_biases
from llmc.compiler.architectures.shared.sharding import rules
from llmc.compiler.architectures.shared.size import ModelSize

NAMES = Names(
    "gpt_neox.layers", "gpt_neox.embed_in.weight", others=lambda config: with_biases("gpt_neox.final_layer_norm"),
    stored={"embed_out.weight": "lm_head.weight"},
)  # fmt: skip


def _layer(config: Config) -> list[str]:
    attention = ["attention.query_key_value", "attention.dense"]
    parts = with_biases("input_layernorm", "post_attention_layernorm", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
    if config.get("attention_bias", True):
        return parts + with_biases(*attention)
    return parts + [f"{name}.weight" for name in attention]


def _rope(config: Config) -> dict[str, Any]:
    """`rotary_pct` and `rotary_emb_base` are what transformers 5 calls partial_rotary_factor and rope_theta."""
    if config.get("rope_parameters"):
        return {}
    base, part = config.get("rotary_emb_base", 10000), config.get("rotary_pct", 0.25)
    return {"rope_parameters": {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": part}}


FAMILY = Family(
    model_class="GPTNeoXForCausalLM",
    layer=_layer,
    names=NAMES,
    computed=(".attention.bias", ".attention.masked_bias", ".attention.rotary_emb.inv_freq"),
    derived=_rope,
    unread=frozenset({"num_key_value_heads", "head_dim", "rms_norm_eps"}),
    reads=frozenset({"layer_norm_eps", "use_parallel_residual", "attention_bias", "partial_rotary_factor"}),
    harmless=frozenset({"classifier_dropout", "rotary_pct", "rotary_emb_base"}),
    sharding=rules(
        NAMES, query=r"attention\.query_key_value", output=r"attention\.dense", up=r"mlp\.dense_h_to_4h",
        down=r"mlp\.dense_4h_to_h",
    ),
    size=ModelSize.ungated,
    tiny={
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 128, "hidden_act": "gelu", "layer_norm_eps": 1e-5, "use_parallel_residual": True,
        "rotary_pct": 0.5, "tie_word_embeddings": False,
    },
)  # fmt: skip
