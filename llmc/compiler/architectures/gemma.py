"""Gemma: Llama's layers with norms that add one to their weight, GELU, and scaled embeddings."""

from __future__ import annotations

from llmc.compiler.architectures.shared.base import Config, Family
from llmc.compiler.architectures.shared.names import layer
from llmc.compiler.architectures.shared.size import tied_size
from llmc.compiler.architectures.shared.tiny import TINY


def _layer(config: Config) -> list[str]:
    return layer("qkvo" if config.get("attention_bias") else "")


FAMILY = Family(
    model_class="GemmaForCausalLM",
    layer=_layer,
    reads=frozenset({"attention_bias"}),
    allows={"use_bidirectional_attention": (False,), "hidden_activation": ("gelu_pytorch_tanh",)},
    size=tied_size,
    tiny={**TINY, "num_hidden_layers": 2, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"},
)
