"""DeepSeek V3 and R1: latent attention, dense layers first, then experts chosen by group beside shared ones."""

from __future__ import annotations

from llmc.compiler.architectures.shared.base import Family
from llmc.compiler.architectures.shared.experts import (
    PREDICTORS,
    SHARED,
    Experts,
    first_dense,
    further_layers,
    mixed_layers,
)
from llmc.compiler.architectures.shared.latent import (
    LATENT_RULES,
    LATENT_TINY,
    READS,
    LatentSize,
    latent_cache,
    latent_layer,
)

_COUNT = ("n_routed_experts", "num_local_experts")
_DENSE = first_dense(3)

FAMILY = Family(
    model_class="DeepseekV3ForCausalLM",
    layer_at=mixed_layers(_DENSE, latent_layer, ("gate.weight", "gate.e_score_correction_bias", *SHARED)),
    ignored=further_layers,
    reads=frozenset({
        *READS, *_COUNT, "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size", "first_k_dense_replace",
        "routed_scaling_factor", "n_group", "topk_group", "norm_topk_prob", "rope_interleave",
    }),
    allows={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)},
    harmless=frozenset({
        *PREDICTORS, "aux_loss_alpha", "seq_aux", "ep_size", "output_router_logits", "qk_head_dim",
    }),
    cache=latent_cache,
    experts=Experts(_COUNT),
    sharding=LATENT_RULES,
    size=LatentSize.reading(
        _COUNT, "num_experts_per_tok", "moe_intermediate_size", shared_count="n_shared_experts", dense=_DENSE
    ),
    fused={"linear": 9, "rms_norm": 2},
    tiny={**LATENT_TINY, "norm_topk_prob": True},
)  # fmt: skip
