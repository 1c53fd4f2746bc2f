"""OLMo 3: OLMo 2's layers, some with a sliding window; those without one may scale their RoPE."""

from __future__ import annotations

from llmc.compiler.architectures.shared.base import Config, Family
from llmc.compiler.architectures.shared.cache import cache_in_turn
from llmc.compiler.architectures.shared.names import layer
from llmc.compiler.architectures.shared.tiny import TINY, WINDOW


def _layer(config: Config) -> list[str]:
    found = layer("qkvo" if config.get("attention_bias") else "", qk_norms=True)
    return ["post_feedforward_layernorm.weight", *(part for part in found if part != "input_layernorm.weight")]


FAMILY = Family(
    model_class="Olmo3ForCausalLM",
    layer=_layer,
    reads=frozenset({"attention_bias", "sliding_window", "layer_types"}),
    cache=cache_in_turn(4),
    tiny={
        **{k: v for k, v in TINY.items() if k != "head_dim"}, "num_hidden_layers": 2, "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"], "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
                "attention_factor": 1.2, "beta_fast": 8.0, "beta_slow": 1.0,
            },
        },
    },
)  # fmt: skip
