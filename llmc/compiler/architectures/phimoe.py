"""Phi with experts (Phi-3.5-MoE): LayerNorm, and two experts a token, each weighed among those that are near it."""

from __future__ import annotations

from llmc.compiler.architectures.shared.base import Config, Family
from llmc.compiler.architectures.shared.experts import EXPERT_RULES, Experts, ExpertsSize, expert_layer
from llmc.compiler.architectures.shared.names import HEAD, Names, layer, with_biases
from llmc.compiler.architectures.shared.tiny import TINY

_NORMS = ["input_layernorm.bias", "post_attention_layernorm.bias"]


def _others(config: Config) -> list[str]:
    return [*with_biases("model.norm"), *(["lm_head.bias"] if config.get("lm_head_bias") else [])]


FAMILY = Family(
    model_class="PhimoeForCausalLM",
    layer=lambda config: [
        *expert_layer(layer("qkvo" if config.get("attention_bias") else ""), ("router.weight",)), *_NORMS
    ],
    names=Names(others=_others, head=HEAD),
    reads=frozenset({
        "num_local_experts", "num_experts_per_tok", "router_jitter_noise", "attention_bias", "lm_head_bias",
    }),
    harmless=frozenset({"router_aux_loss_coef", "output_router_logits", "input_jitter_noise"}),
    experts=Experts(("num_local_experts",), "w123-router"),
    sharding=EXPERT_RULES,
    size=ExpertsSize.reading(("num_local_experts",), "num_experts_per_tok"),
    fused={"linear": 3, "rms_norm": 0},
    tiny={
        **TINY, "num_hidden_layers": 2, "num_local_experts": 8, "num_experts_per_tok": 2, "router_jitter_noise": 0.2,
        "attention_bias": True, "lm_head_bias": True,
    },
)  # fmt: skip
