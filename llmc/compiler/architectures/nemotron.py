"""Nemotron 4 and Minitron: LayerNorms that add one to their weight, half of each head rotated, squared ReLU."""

from __future__ import annotations

from llmc.compiler.architectures.shared.base import Config, Family
from llmc.compiler.architectures.shared.names import NORM, Names, layer, with_biases
from llmc.compiler.architectures.shared.size import ModelSize
from llmc.compiler.architectures.shared.tiny import TINY


def _layer(config: Config) -> list[str]:
    found = layer("qkvo" if config.get("attention_bias") else "", mlp_biases=bool(config.get("mlp_bias")))
    norms = ["input_layernorm.bias", "post_attention_layernorm.bias"]
    return [*norms, *(part for part in found if not part.startswith("mlp.gate_proj."))]


FAMILY = Family(
    model_class="NemotronForCausalLM",
    layer=_layer,
    names=Names(others=lambda config: with_biases(NORM.removesuffix(".weight"))),
    unread=frozenset({"rms_norm_eps"}),
    reads=frozenset({"attention_bias", "mlp_bias", "norm_eps", "partial_rotary_factor"}),
    size=ModelSize.ungated,
    tiny={
        **{k: v for k, v in TINY.items() if k != "rms_norm_eps"}, "num_hidden_layers": 2, "norm_eps": 1e-5,
        "hidden_act": "relu2",
    },
)  # fmt: skip
