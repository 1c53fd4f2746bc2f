"""OLMo: Llama's layers with LayerNorms that have no weights; a key clips queries, keys and values."""

from __future__ import annotations

from llmc.compiler.architectures.shared.base import Config, Family
from llmc.compiler.architectures.shared.names import Names, layer
from llmc.compiler.architectures.shared.tiny import TINY


def _layer(config: Config) -> list[str]:
    return [part for part in layer("qkvo" if config.get("attention_bias") else "") if "layernorm" not in part]


FAMILY = Family(
    model_class="OlmoForCausalLM",
    layer=_layer,
    names=Names(others=lambda config: []),
    unread=frozenset({"rms_norm_eps", "head_dim"}),
    reads=frozenset({"attention_bias", "clip_qkv"}),
    tiny={
        **{k: v for k, v in TINY.items() if k not in ("rms_norm_eps", "head_dim")}, "num_hidden_layers": 2,
        "clip_qkv": 1.5,
    },
)  # fmt: skip
