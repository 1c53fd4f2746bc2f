"""Phi's models."""

from __future__ import annotations

from llmc.compiler.architectures.shared.base import TINY, WINDOW, Architecture, tiny_without
from llmc.compiler.architectures.shared.cache import Config
from llmc.compiler.architectures.shared.experts import EXPERT_RULES, Experts, ExpertsSize, expert_layer
from llmc.compiler.architectures.shared.gguf_form import WINDOWS, Gguf
from llmc.compiler.architectures.shared.names import LM_HEAD, Names, biased_layer, with_biases
from llmc.compiler.architectures.shared.sharding import PACKED_RULES, rules
from llmc.compiler.architectures.shared.size import ModelSize

ARCHITECTURES: dict[str, Architecture] = {}

NAMES = Names(others=lambda config: [*with_biases("model.final_layernorm"), "lm_head.bias"])


def _layer(config: Config) -> list[str]:
    parts = [*(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "dense")), "mlp.fc1", "mlp.fc2"]
    norms = ["self_attn.q_layernorm", "self_attn.k_layernorm"] if config.get("qk_layernorm") else []
    return with_biases("input_layernorm", *parts, *norms)


ARCHITECTURES["phi"] = Architecture(
    summary=(
        "Phi 1, 1.5 and 2: attention and MLP read the same hidden states, heads are partly rotated, lm_head has a "
        "bias."
    ),
    model_class="PhiForCausalLM",
    layer=_layer,
    names=NAMES,
    unread=frozenset({"head_dim", "rms_norm_eps"}),
    reads=frozenset({"layer_norm_eps", "qk_layernorm", "partial_rotary_factor"}),
    sharding=rules(
        NAMES, query=r"self_attn\.q_proj", keys=r"self_attn\.[kv]_proj", output=r"self_attn\.dense", up=r"mlp\.fc1",
        down=r"mlp\.fc2",
    ),
    size=ModelSize.ungated,
    gguf=Gguf("phi2", config=lambda facts: {"hidden_act": "gelu_new", "qk_layernorm": False}),
    tiny={
        **tiny_without("head_dim", "rms_norm_eps"),
        "num_hidden_layers": 2, "hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5,
    },
)  # fmt: skip


_LAYER = [
    "input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.qkv_proj.weight", "self_attn.o_proj.weight",
    "mlp.gate_up_proj.weight", "mlp.down_proj.weight",
]  # fmt: skip


ARCHITECTURES["phi3"] = Architecture(
    summary="Phi-3 and Phi-4: Llama's layers with one tensor for q, k and v, and one for gate and up.",
    model_class="Phi3ForCausalLM",
    layer=lambda config: list(_LAYER),
    reads=frozenset({"original_max_position_embeddings", "partial_rotary_factor", "sliding_window"}),
    allows={"full_attn_mod": (1,), "interpolate_factor": (1,), "lm_head_bias": (False,)},
    sharding=PACKED_RULES,
    gguf=Gguf(
        "phi3", config=lambda facts: {
            "sliding_window": facts.get("attention.sliding_window") or None,
            "original_max_position_embeddings": facts.get(
                "rope.scaling.original_context_length", facts.common["max_position_embeddings"]
            ),
        }, reads=WINDOWS,
    ),
    tiny={
        **TINY, "num_hidden_layers": 2, "sliding_window": WINDOW, "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
)  # fmt: skip


_NORMS = ["input_layernorm.bias", "post_attention_layernorm.bias"]


def _others(config: Config) -> list[str]:
    return [*with_biases("model.norm"), *(["lm_head.bias"] if config.get("lm_head_bias") else [])]


ARCHITECTURES["phimoe"] = Architecture(
    summary=(
        "Phi with experts (Phi-3.5-MoE): LayerNorm, and two experts per token, each weighted against experts with a "
        "similar score."
    ),
    model_class="PhimoeForCausalLM",
    layer=lambda config: [*expert_layer(biased_layer(config), ("router.weight",)), *_NORMS],
    names=Names(others=_others, lm_head=LM_HEAD),
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
