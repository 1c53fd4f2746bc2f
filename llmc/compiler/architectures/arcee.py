"""Arcee's AFM: Llama's layers with an MLP that has no gate, and squares what ReLU leaves."""

from __future__ import annotations

from llmc.compiler.architectures.shared.base import Config, Family
from llmc.compiler.architectures.shared.names import layer
from llmc.compiler.architectures.shared.size import ModelSize
from llmc.compiler.architectures.shared.tiny import TINY


def _layer(config: Config) -> list[str]:
    found = layer("qkvo" if config.get("attention_bias") else "", mlp_biases=bool(config.get("mlp_bias")))
    return [part for part in found if not part.startswith("mlp.gate_proj.")]


FAMILY = Family(
    model_class="ArceeForCausalLM",
    layer=_layer,
    reads=frozenset({"attention_bias", "mlp_bias"}),
    size=ModelSize.ungated,
    tiny={**TINY, "num_hidden_layers": 2, "hidden_act": "relu2"},
)
