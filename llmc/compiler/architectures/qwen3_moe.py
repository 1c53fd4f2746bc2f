"""Qwen3 with experts: its attention, and MLPs of which each token takes some."""

from __future__ import annotations

from llmc.compiler.architectures.shared.base import Config, Family
from llmc.compiler.architectures.shared.cache import attention_cache
from llmc.compiler.architectures.shared.experts import EXPERT_RULES, Experts, ExpertsSize, mixed_layers, not_sparse
from llmc.compiler.architectures.shared.names import layer
from llmc.compiler.architectures.shared.tiny import TINY
from llmc.runtime.cache_shape import CacheShape


def _cache(config: Config) -> CacheShape:
    """All layers have the window, or none."""
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    return attention_cache({**config, "sliding_window": window})


FAMILY = Family(
    model_class="Qwen3MoeForCausalLM",
    layer_at=mixed_layers(
        not_sparse,
        lambda config: layer("qkvo" if config.get("attention_bias") else "", qk_norms=True),
        ("gate.weight",),
    ),
    reads=frozenset({
        "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
        "attention_bias", "use_sliding_window", "sliding_window", "decoder_sparse_step", "mlp_only_layers",
    }),
    harmless=frozenset({"router_aux_loss_coef", "output_router_logits", "max_window_layers"}),
    cache=_cache,
    experts=Experts(("num_experts", "num_local_experts")),
    sharding=EXPERT_RULES,
    size=ExpertsSize.reading(
        ("num_experts", "num_local_experts"), "num_experts_per_tok", "moe_intermediate_size", dense=not_sparse
    ),
    fused={"linear": 5, "rms_norm": 2},
    tiny={
        **TINY, "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    },
)  # fmt: skip
