"""Qwen3.5's text part with experts: its layers, each with many small MLPs and one that all tokens take."""

from __future__ import annotations

from llmc.compiler.architectures.shared.base import Family
from llmc.compiler.architectures.shared.delta import (
    DELTA_RULES,
    EXPERT_READS,
    TINY_EXPERTS,
    delta_cache,
    expert_delta_layer,
    expert_delta_size,
)
from llmc.compiler.architectures.shared.experts import EXPERT_RULES, Experts
from llmc.compiler.architectures.shared.tiny import TINY

FAMILY = Family(
    model_class="Qwen3_5MoeForCausalLM",
    layer_at=expert_delta_layer,
    unread=frozenset({"intermediate_size"}),
    reads=EXPERT_READS,
    harmless=frozenset({"router_aux_loss_coef", "output_router_logits"}),
    experts=Experts(("num_experts",)),
    sharding=(*EXPERT_RULES, DELTA_RULES[-1]),
    size=expert_delta_size,
    cache=delta_cache,
    fused={"linear": 6, "rms_norm": 0},
    tiny={**{k: v for k, v in TINY.items() if k != "intermediate_size"}, **TINY_EXPERTS},
)
