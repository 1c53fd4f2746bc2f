"""Qwen3-Next: layers of the gated delta rule, each fourth one of gated attention, many experts and a shared one."""

from __future__ import annotations

from functools import partial

from llmc.compiler.architectures.shared.base import Family
from llmc.compiler.architectures.shared.delta import (
    DELTA_RULES,
    EXPERT_READS,
    TINY_EXPERTS,
    TOGETHER,
    delta_cache,
    expert_delta_layer,
    expert_delta_size,
)
from llmc.compiler.architectures.shared.experts import EXPERT_RULES, Experts
from llmc.compiler.architectures.shared.tiny import TINY

FAMILY = Family(
    model_class="Qwen3NextForCausalLM",
    layer_at=partial(expert_delta_layer, projections=TOGETHER),
    reads=EXPERT_READS | {"norm_topk_prob", "full_attention_interval"},
    allows={"decoder_sparse_step": (1,), "mlp_only_layers": ([],)},
    harmless=frozenset({"router_aux_loss_coef", "output_router_logits", "intermediate_size"}),
    experts=Experts(("num_experts",)),
    sharding=(*EXPERT_RULES, DELTA_RULES[-1]),
    size=expert_delta_size,
    cache=delta_cache,
    fused={"linear": 6, "rms_norm": 0},
    tiny={**TINY, **TINY_EXPERTS, "norm_topk_prob": True},
)
