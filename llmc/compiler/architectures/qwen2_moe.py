"""Qwen2 with experts: biases on q, k and v, and beside the experts an MLP that all take, through a gate."""

from __future__ import annotations

from llmc.compiler.architectures.shared.base import Family
from llmc.compiler.architectures.shared.cache import attention_cache
from llmc.compiler.architectures.shared.experts import EXPERT_RULES, Experts, ExpertsSize, mixed_layers, not_sparse
from llmc.compiler.architectures.shared.names import layer
from llmc.compiler.architectures.shared.tiny import TINY

_SHARED = [f"shared_expert.{name}_proj.weight" for name in ("gate", "up", "down")]

FAMILY = Family(
    model_class="Qwen2MoeForCausalLM",
    layer_at=mixed_layers(
        not_sparse,
        lambda config: layer("qkv" if config.get("qkv_bias", True) else ""),
        ("gate.weight", "shared_expert_gate.weight", *_SHARED),
    ),
    reads=frozenset({
        "num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size",
        "norm_topk_prob", "qkv_bias", "decoder_sparse_step", "mlp_only_layers",
    }),
    # these have an effect only with use_sliding_window, which is refused
    harmless=frozenset({
        "sliding_window", "max_window_layers", "layer_types", "router_aux_loss_coef", "output_router_logits",
    }),
    cache=lambda config: attention_cache({**config, "layer_types": None, "sliding_window": None}),
    experts=Experts(("num_experts",)),
    sharding=EXPERT_RULES,
    size=ExpertsSize.reading(
        ("num_experts",), "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size",
        dense=not_sparse,
    ),
    fused={"linear": 6, "rms_norm": 0},
    tiny={
        **TINY, "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80, "mlp_only_layers": [1],
    },
)  # fmt: skip
