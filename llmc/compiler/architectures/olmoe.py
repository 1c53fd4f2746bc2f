"""OLMoE: queries and keys are normed over all heads at once, and each token takes some of many small MLPs."""

from __future__ import annotations

from llmc.compiler.architectures.shared.base import Family
from llmc.compiler.architectures.shared.experts import EXPERT_RULES, Experts, ExpertsSize, expert_layer
from llmc.compiler.architectures.shared.names import layer
from llmc.compiler.architectures.shared.tiny import TINY

FAMILY = Family(
    model_class="OlmoeForCausalLM",
    layer=lambda config: expert_layer(layer("qkvo" if config.get("attention_bias") else "", qk_norms=True)),
    reads=frozenset({"num_experts", "num_experts_per_tok", "norm_topk_prob", "attention_bias"}),
    harmless=frozenset({"router_aux_loss_coef", "output_router_logits"}),
    experts=Experts(("num_experts",)),
    sharding=EXPERT_RULES,
    size=ExpertsSize.reading(("num_experts",), "num_experts_per_tok"),
    fused={"linear": 5, "rms_norm": 2},
    tiny={**TINY, "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2},
)
