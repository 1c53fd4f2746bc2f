"""Llama, and whatever has its layers: biases are optional, GGUF files have the rows of q and k interleaved."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from llmc.compiler.architectures.shared.base import Config, Family, Gguf
from llmc.compiler.architectures.shared.names import layer
from llmc.compiler.architectures.shared.tiny import TINY


def _layer(config: Config) -> list[str]:
    return layer("qkvo" if config.get("attention_bias") else "", mlp_biases=bool(config.get("mlp_bias")))


def _gguf_config(tensors: Container[str]) -> dict[str, Any]:
    return {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_up.bias" in tensors}


FAMILY = Family(
    model_class="LlamaForCausalLM",
    layer=_layer,
    reads=frozenset({"attention_bias", "mlp_bias"}),
    gguf=Gguf("llama", interleaved=("q_proj", "k_proj"), config=_gguf_config),
    tiny={**TINY, "num_hidden_layers": 2},
)
