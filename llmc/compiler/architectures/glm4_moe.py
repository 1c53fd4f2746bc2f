"""GLM 4.5 and 4.6: half of each head is rotated, dense layers first, then experts by group beside shared ones."""

from __future__ import annotations

from llmc.compiler.architectures.shared.base import Config, Family
from llmc.compiler.architectures.shared.experts import (
    EXPERT_RULES,
    PREDICTORS,
    SHARED,
    Experts,
    ExpertsSize,
    first_dense,
    further_layers,
    mixed_layers,
)
from llmc.compiler.architectures.shared.names import layer
from llmc.compiler.architectures.shared.tiny import TINY

_COUNT = ("n_routed_experts", "num_local_experts")
_DENSE = first_dense(1)


def _attention(config: Config) -> list[str]:
    return layer("qkv" if config.get("attention_bias") else "", qk_norms=bool(config.get("use_qk_norm")))


FAMILY = Family(
    model_class="Glm4MoeForCausalLM",
    layer_at=mixed_layers(_DENSE, _attention, ("gate.weight", "gate.e_score_correction_bias", *SHARED)),
    ignored=further_layers,
    reads=frozenset({
        *_COUNT, "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size", "first_k_dense_replace",
        "routed_scaling_factor", "n_group", "topk_group", "norm_topk_prob", "attention_bias", "use_qk_norm",
        "partial_rotary_factor",
    }),
    harmless=frozenset({*PREDICTORS, "output_router_logits"}),
    experts=Experts(_COUNT),
    sharding=EXPERT_RULES,
    size=ExpertsSize.reading(
        _COUNT, "num_experts_per_tok", "moe_intermediate_size", shared_count="n_shared_experts", dense=_DENSE
    ),
    fused={"linear": 9, "rms_norm": 2},
    tiny={
        **TINY, "num_hidden_layers": 2, "first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 48, "n_shared_experts": 2, "n_group": 4, "topk_group": 2,
        "routed_scaling_factor": 2.5, "norm_topk_prob": True, "attention_bias": True, "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
    },
)  # fmt: skip
