"""Hunyuan's dense models: Llama's layers, where queries and keys are normed after they are rotated."""

from __future__ import annotations

from llmc.compiler.architectures.shared.base import Config, Family
from llmc.compiler.architectures.shared.names import layer
from llmc.compiler.architectures.shared.tiny import TINY


def _layer(config: Config) -> list[str]:
    found = layer("qkvo" if config.get("attention_bias") else "")
    return [*found, "self_attn.query_layernorm.weight", "self_attn.key_layernorm.weight"]


FAMILY = Family(
    model_class="HunYuanDenseV1ForCausalLM",
    layer=_layer,
    reads=frozenset({"attention_bias"}),
    rope={"dynamic": frozenset({"alpha"})},
    allows={"use_qk_norm": (True,), "use_cla": (False,)},
    harmless=frozenset({"eod_token_id"}),
    tiny={
        **TINY, "num_hidden_layers": 2,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 1000.0},
    },
)  # fmt: skip
