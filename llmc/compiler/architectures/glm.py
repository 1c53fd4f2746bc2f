"""GLM 4."""

from __future__ import annotations

from llmc.compiler.architectures.shared.base import TINY, Architecture
from llmc.compiler.architectures.shared.cache import Config
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
from llmc.compiler.architectures.shared.gguf_form import ROUTED_EXPERTS, Gguf, attention_bias
from llmc.compiler.architectures.shared.names import biased_layer
from llmc.compiler.architectures.shared.sharding import PACKED_RULES

ARCHITECTURES: dict[str, Architecture] = {}


def _layer(config: Config) -> list[str]:
    return biased_layer(config, "qkv", default=True, packed_mlp=True)


ARCHITECTURES["glm"] = Architecture(
    summary="GLM 4: gate and up are one tensor; RoPE rotates neighbours in half of each head.",
    model_class="GlmForCausalLM",
    layer=_layer,
    reads=frozenset({"attention_bias", "partial_rotary_factor"}),
    sharding=PACKED_RULES,
    tiny={**TINY, "num_hidden_layers": 2, "pad_token_id": 0, "attention_bias": True, "partial_rotary_factor": 0.5},
)


_NORMS = ["post_self_attn_layernorm.weight", "post_mlp_layernorm.weight"]


ARCHITECTURES["glm4"] = Architecture(
    summary="GLM 4 0414: GLM's layers with a further norm on the output of each block.",
    model_class="Glm4ForCausalLM",
    layer=lambda config: [*_layer(config), *_NORMS],
    reads=frozenset({"attention_bias", "partial_rotary_factor"}),
    sharding=PACKED_RULES,
    gguf=Gguf("glm4", config=attention_bias),
    tiny={**TINY, "num_hidden_layers": 2, "pad_token_id": 0, "attention_bias": True, "partial_rotary_factor": 0.5},
)


_COUNT = ("n_routed_experts", "num_local_experts")
_DENSE = first_dense(1)


def _attention(config: Config) -> list[str]:
    return biased_layer(config, "qkv", qk_norms=bool(config.get("use_qk_norm")))


ARCHITECTURES["glm4_moe"] = Architecture(
    summary=(
        "GLM 4.5 and 4.6: half of each head is rotated; dense layers first, then group-limited routed experts and "
        "shared ones."
    ),
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
    gguf=Gguf(
        "glm4moe",
        keys=ROUTED_EXPERTS | {"expert_weights_norm": "norm_topk_prob"},
        config=lambda facts: {
            **attention_bias(facts), "use_qk_norm": "blk.0.attn_q_norm.weight" in facts,
        },
        reads=frozenset({"nextn_predict_layers"}),
        neutral={"expert_gating_func": (2,)},
    ),
    tiny={
        **TINY, "num_hidden_layers": 2, "first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 48, "n_shared_experts": 2, "n_group": 4, "topk_group": 2,
        "routed_scaling_factor": 2.5, "norm_topk_prob": True, "attention_bias": True, "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
    },
)  # fmt: skip
