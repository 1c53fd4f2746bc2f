"""Helium: Llama's layers, which rotate neighbours of a head with each other."""

from __future__ import annotations

from llmc.compiler.architectures.shared.base import Config, Family
from llmc.compiler.architectures.shared.names import layer
from llmc.compiler.architectures.shared.tiny import TINY


def _layer(config: Config) -> list[str]:
    return layer("qkv" if config.get("attention_bias") else "", mlp_biases=bool(config.get("mlp_bias")))


FAMILY = Family(
    model_class="HeliumForCausalLM",
    layer=_layer,
    reads=frozenset({"attention_bias", "mlp_bias"}),
    tiny={**TINY, "num_hidden_layers": 2, "pad_token_id": 0},
)
