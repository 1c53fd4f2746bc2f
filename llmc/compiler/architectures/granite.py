"""Granite 3: Llama's layers, where keys of the configuration scale embeddings, scores, residuals and logits."""

from __future__ import annotations

from llmc.compiler.architectures.shared.base import Config, Family
from llmc.compiler.architectures.shared.names import layer
from llmc.compiler.architectures.shared.tiny import TINY


def _layer(config: Config) -> list[str]:
    return layer("qkvo" if config.get("attention_bias") else "", mlp_biases=bool(config.get("mlp_bias")))


FAMILY = Family(
    model_class="GraniteForCausalLM",
    layer=_layer,
    reads=frozenset({
        "attention_bias", "mlp_bias", "embedding_multiplier", "logits_scaling", "residual_multiplier",
        "attention_multiplier",
    }),
    tiny={
        **TINY, "num_hidden_layers": 2, "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
    },
)  # fmt: skip
