"""OLMo 2: what a block gives is normed, not what it takes; queries and keys are normed over all heads together."""

from __future__ import annotations

from llmc.compiler.architectures.shared.base import Config, Family
from llmc.compiler.architectures.shared.names import layer
from llmc.compiler.architectures.shared.tiny import TINY


def _layer(config: Config) -> list[str]:
    found = layer("qkvo" if config.get("attention_bias") else "", qk_norms=True)
    return ["post_feedforward_layernorm.weight", *(part for part in found if part != "input_layernorm.weight")]


FAMILY = Family(
    model_class="Olmo2ForCausalLM",
    layer=_layer,
    reads=frozenset({"attention_bias"}),
    tiny={**{k: v for k, v in TINY.items() if k != "head_dim"}, "num_hidden_layers": 2},
)
