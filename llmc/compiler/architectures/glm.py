"""GLM 4: gate and up are one tensor, half of each head is rotated, neighbours with each other."""

from __future__ import annotations

from llmc.compiler.architectures.shared.base import Config, Family
from llmc.compiler.architectures.shared.names import layer
from llmc.compiler.architectures.shared.sharding import PACKED_RULES
from llmc.compiler.architectures.shared.tiny import TINY


def _layer(config: Config) -> list[str]:
    return layer("qkv" if config.get("attention_bias", True) else "", packed_mlp=True)


FAMILY = Family(
    model_class="GlmForCausalLM",
    layer=_layer,
    reads=frozenset({"attention_bias", "partial_rotary_factor"}),
    sharding=PACKED_RULES,
    tiny={**TINY, "num_hidden_layers": 2, "pad_token_id": 0, "attention_bias": True, "partial_rotary_factor": 0.5},
)
