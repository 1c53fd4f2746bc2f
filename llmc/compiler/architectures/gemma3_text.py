"""Gemma 3's text model: Gemma 2's layers with normed queries and keys; windows and global layers have a RoPE each."""

from __future__ import annotations

from typing import Any

from llmc.compiler.architectures.shared.base import Config, Family
from llmc.compiler.architectures.shared.cache import cache_in_turn
from llmc.compiler.architectures.shared.names import layer
from llmc.compiler.architectures.shared.size import tied_size
from llmc.compiler.architectures.shared.tiny import TINY, WINDOW

DEFAULTS = {
    "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "max_position_embeddings": 131072,
}  # fmt: skip
"""What `text_config` of published checkpoints leaves out (google/gemma-3-4b-it): transformers 5.23's defaults,
models/gemma3/configuration_gemma3.py."""


def _layer(config: Config) -> list[str]:
    norms = ["pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight"]
    return [*layer("qkvo" if config.get("attention_bias") else "", qk_norms=True), *norms]


def _derived(config: Config) -> dict[str, Any]:
    return {name: config.get(name, default) for name, default in DEFAULTS.items()}


FAMILY = Family(
    model_class="Gemma3ForCausalLM",
    layer=_layer,
    derived=_derived,
    unread=frozenset({"hidden_act"}),
    reads=frozenset({
        "attention_bias", "hidden_activation", "query_pre_attn_scalar", "sliding_window", "layer_types",
        "sliding_window_pattern", "final_logit_softcapping", "rope_local_base_freq",
    }),
    allows={"use_bidirectional_attention": (False,), "_sliding_window_pattern": (6,)},
    harmless=frozenset({"cache_implementation"}),
    cache=cache_in_turn(6),
    size=tied_size,
    tiny={
        **TINY, "num_hidden_layers": 2, "tie_word_embeddings": True, "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"], "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 24, "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0},
        },
    },
)  # fmt: skip
