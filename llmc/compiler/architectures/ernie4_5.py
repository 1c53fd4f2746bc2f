"""ERNIE 4.5: Llama's layers, which rotate neighbours of a head with each other; one key gives all a bias."""

from __future__ import annotations

from llmc.compiler.architectures.shared.base import Config, Family
from llmc.compiler.architectures.shared.names import layer
from llmc.compiler.architectures.shared.size import tied_size
from llmc.compiler.architectures.shared.tiny import TINY


def _layer(config: Config) -> list[str]:
    return layer("qkvo" if config.get("use_bias") else "", mlp_biases=bool(config.get("use_bias")))


FAMILY = Family(
    model_class="Ernie4_5ForCausalLM",
    layer=_layer,
    reads=frozenset({"use_bias"}),
    size=tied_size,
    tiny={**TINY, "num_hidden_layers": 2, "use_bias": True},
)
