"""EXAONE 4: what a block gives is normed, not what it takes; layers without a window have no rotary positions."""

from __future__ import annotations

from llmc.compiler.architectures.shared.base import Config, Family
from llmc.compiler.architectures.shared.cache import cache_in_turn
from llmc.compiler.architectures.shared.names import layer
from llmc.compiler.architectures.shared.tiny import TINY, WINDOW


def _layer(config: Config) -> list[str]:
    parts = layer(qk_norms=True)
    return ["post_feedforward_layernorm.weight", *(part for part in parts if part != "input_layernorm.weight")]


FAMILY = Family(
    model_class="Exaone4ForCausalLM",
    layer=_layer,
    reads=frozenset({"sliding_window", "sliding_window_pattern", "layer_types"}),
    cache=cache_in_turn(4),
    tiny={
        **TINY, "num_hidden_layers": 2, "sliding_window": WINDOW, "pad_token_id": 0,
        "layer_types": ["sliding_attention", "full_attention"],
    },
)  # fmt: skip
