"""OLMo's models."""

from __future__ import annotations

from typing import Any

from llmc.compiler.architectures.shared.base import TINY, WINDOW, Architecture, tiny_without
from llmc.compiler.architectures.shared.cache import Config, cache_in_turn
from llmc.compiler.architectures.shared.experts import EXPERT_RULES, Experts, ExpertsSize, expert_layer
from llmc.compiler.architectures.shared.gguf_form import WINDOWS, Gguf, GgufFacts, expert_keys, windows
from llmc.compiler.architectures.shared.names import Names, biased_layer

ARCHITECTURES: dict[str, Architecture] = {}


def _olmo_layer(config: Config) -> list[str]:
    return [part for part in biased_layer(config) if "layernorm" not in part]


ARCHITECTURES["olmo"] = Architecture(
    summary="OLMo: Llama's layers with LayerNorms without weights; a key clips queries, keys and values.",
    model_class="OlmoForCausalLM",
    layer=_olmo_layer,
    names=Names(others=lambda config: []),
    unread=frozenset({"rms_norm_eps", "head_dim"}),
    reads=frozenset({"attention_bias", "clip_qkv"}),
    gguf=Gguf("olmo", keys={"attention.clamp_kqv": "clip_qkv"}, interleaved=True),
    tiny={
        **tiny_without("rms_norm_eps", "head_dim"), "num_hidden_layers": 2, "clip_qkv": 1.5,
    },
)  # fmt: skip


def _olmo2_layer(config: Config) -> list[str]:
    found = biased_layer(config, qk_norms=True)
    return ["post_feedforward_layernorm.weight", *(part for part in found if part != "input_layernorm.weight")]


def _gguf_config(facts: GgufFacts) -> dict[str, Any]:
    """Layers with a window rotate without scaling."""
    rope = facts.common["rope_parameters"]
    theta = float(facts.get("rope.freq_base_swa", rope["rope_theta"]))
    return {
        **windows(4)(facts),
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": theta}, "full_attention": rope,
        },
    }  # fmt: skip


ARCHITECTURES["olmo2"] = Architecture(
    summary=(
        "OLMo 2: norms on block outputs instead of inputs; queries and keys are normalised over all heads together."
    ),
    model_class="Olmo2ForCausalLM",
    layer=_olmo2_layer,
    reads=frozenset({"attention_bias"}),
    gguf=Gguf("olmo2", suits=lambda facts: not facts.get("attention.sliding_window")),
    tiny={**tiny_without("head_dim"), "num_hidden_layers": 2},
)


ARCHITECTURES["olmo3"] = Architecture(
    summary="OLMo 3: OLMo 2's layers, some with a sliding window; the others may scale their RoPE.",
    model_class="Olmo3ForCausalLM",
    layer=_olmo2_layer,
    reads=frozenset({"attention_bias", "sliding_window", "layer_types"}),
    cache=cache_in_turn(4),
    gguf=Gguf(
        "olmo2", config=_gguf_config, reads=WINDOWS | {"rope.freq_base_swa"},
        suits=lambda facts: bool(facts.get("attention.sliding_window")),
    ),
    tiny={
        **tiny_without("head_dim"), "num_hidden_layers": 2, "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"], "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
                "attention_factor": 1.2, "beta_fast": 8.0, "beta_slow": 1.0,
            },
        },
    },
)  # fmt: skip


ARCHITECTURES["olmoe"] = Architecture(
    summary="OLMoE: queries and keys are normalised over all heads together; each token uses some of many small MLPs.",
    model_class="OlmoeForCausalLM",
    layer=lambda config: expert_layer(biased_layer(config, qk_norms=True)),
    reads=frozenset({"num_experts", "num_experts_per_tok", "norm_topk_prob", "attention_bias"}),
    harmless=frozenset({"router_aux_loss_coef", "output_router_logits"}),
    experts=Experts(("num_experts",)),
    sharding=EXPERT_RULES,
    size=ExpertsSize.reading(("num_experts",), "num_experts_per_tok"),
    fused={"linear": 5, "rms_norm": 2},
    gguf=Gguf(
        "olmoe",
        keys=expert_keys("num_experts"),
        config=lambda facts: {"norm_topk_prob": False},
    ),
    tiny={**TINY, "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2},
)
