"""Jais 2: Llama's layers with LayerNorms and biases, and an MLP without a gate that squares what ReLU leaves."""

from __future__ import annotations

from llmc.compiler.architectures.shared.base import Config, Family
from llmc.compiler.architectures.shared.names import NORM, Names, layer, with_biases
from llmc.compiler.architectures.shared.size import ModelSize
from llmc.compiler.architectures.shared.tiny import TINY


def _layer(config: Config) -> list[str]:
    biases = "qkvo" if config.get("attention_bias", True) else ""
    found = layer(biases, mlp_biases=bool(config.get("mlp_bias", True)))
    norms = ["input_layernorm.bias", "post_attention_layernorm.bias"]
    return [*norms, *(part for part in found if not part.startswith("mlp.gate_proj."))]


FAMILY = Family(
    model_class="Jais2ForCausalLM",
    layer=_layer,
    names=Names(others=lambda config: with_biases(NORM.removesuffix(".weight"))),
    unread=frozenset({"rms_norm_eps"}),
    reads=frozenset({"attention_bias", "mlp_bias", "layer_norm_eps"}),
    size=ModelSize.ungated,
    tiny={
        **{k: v for k, v in TINY.items() if k != "rms_norm_eps"}, "num_hidden_layers": 2, "layer_norm_eps": 1e-5,
        "hidden_act": "relu2", "attention_bias": True, "mlp_bias": True,
    },
)  # fmt: skip
