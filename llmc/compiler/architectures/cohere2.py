"""Cohere's Command R7B and A: Command R's layers, where those without a window have no rotary positions."""

from __future__ import annotations

from llmc.compiler.architectures.shared.base import Config, Family
from llmc.compiler.architectures.shared.cache import cache_in_turn
from llmc.compiler.architectures.shared.names import layer
from llmc.compiler.architectures.shared.size import tied_size
from llmc.compiler.architectures.shared.tiny import TINY, WINDOW

_DIFFERENT = ("head_dim", "rms_norm_eps")


def _layer(config: Config) -> list[str]:
    found = layer("qkvo" if config.get("attention_bias") else "")
    return [part for part in found if part != "post_attention_layernorm.weight"]


FAMILY = Family(
    model_class="Cohere2ForCausalLM",
    layer=_layer,
    unread=frozenset({"rms_norm_eps"}),
    reads=frozenset({
        "attention_bias", "layer_norm_eps", "logit_scale", "sliding_window", "layer_types", "sliding_window_pattern",
    }),
    allows={
        "layer_switch": (4,), "order_of_interleaved_layers": ("local_attn_first",), "rotary_pct": (1, 1.0),
        "position_embedding_type": ("rope_gptj",), "use_embedding_sharing": (True,), "use_gated_activation": (True,),
        "use_parallel_block": (True,), "use_parallel_embedding": (False,),
    },
    harmless=frozenset({"cache_implementation", "model_max_length"}),
    cache=cache_in_turn(4),
    size=tied_size,
    tiny={
        **{name: value for name, value in TINY.items() if name not in _DIFFERENT}, "num_hidden_layers": 2,
        "tie_word_embeddings": True, "layer_norm_eps": 1e-5, "logit_scale": 0.5, "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
    },
)  # fmt: skip
