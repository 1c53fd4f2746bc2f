"""DeepSeek, GLM, ERNIE and gpt-oss, and DeepSeek's multi-head latent attention (MLA).

Queries may come from a latent of their own. Keys and values come from a latent that all heads share, with a separate
rotated part of the key. transformers 5.23 (models/deepseek_v3, `expand_kv`) caches the latents and expands keys and
values of all tokens at each step. Here the cache holds each token's keys and values per head.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from typing import Any

from llmc.compiler.architectures.shared.base import TINY, WINDOW, Architecture, tiny_without
from llmc.compiler.architectures.shared.cache import Config, cache_in_turn
from llmc.compiler.architectures.shared.experts import (
    EXPERT_RULES,
    PREDICTORS,
    SHARED,
    Experts,
    ExpertsSize,
    expert_layer,
    first_dense,
    further_layers,
    mixed_layers,
)
from llmc.compiler.architectures.shared.gguf_form import (
    ROUTED_EXPERTS,
    WINDOWS,
    Gguf,
    GgufFacts,
    attention_bias,
    expert_keys,
    windows,
)
from llmc.compiler.architectures.shared.names import biased_layer, layer
from llmc.compiler.architectures.shared.sharding import LAYER, PACKED_RULES, Rule
from llmc.compiler.architectures.shared.size import tied_size
from llmc.runtime.cache_shape import CacheShape, key_value

ARCHITECTURES: dict[str, Architecture] = {}

READS = frozenset(
    {"q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "attention_bias"}
)
"""Keys of config.json for latent attention."""


def latent_layer(config: Mapping[str, Any]) -> list[str]:
    """Tensors of a layer with a dense MLP."""
    rest = [name for name in layer() if not name.startswith("self_attn.")]
    biased = ["kv_a_proj_with_mqa", "o_proj"]
    parts = ["kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"]
    if config.get("q_lora_rank", 1536) is None:
        parts.append("q_proj")
    else:
        parts += ["q_a_proj", "q_a_layernorm", "q_b_proj"]
        biased.append("q_a_proj")
    biases = [f"self_attn.{part}.bias" for part in biased] if config.get("attention_bias") else []
    return [*rest, *(f"self_attn.{part}.weight" for part in parts), *biases]


def latent_cache(config: Mapping[str, Any]) -> CacheShape:
    """A key and a value per head, of different widths."""
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    width = config.get("qk_nope_head_dim", 128) + config.get("qk_rope_head_dim", 64)
    values = config.get("v_head_dim", 128)
    return CacheShape(layers, tuple(t for i in range(layers) for t in key_value(i, heads, width, values)))


_HEADS = ("num_attention_heads", "query heads", "q_proj, q_b_proj, kv_b_proj and o_proj")
LATENT_RULES = (
    *EXPERT_RULES,
    Rule("heads of latents", LAYER + r"self_attn\.(?:q|kv)_b_proj\.weight", 0, *_HEADS),
    Rule("latents", LAYER + r"self_attn\.(?:q_a_proj|kv_a_proj_with_mqa)\.(?:weight|bias)", None),
)
"""Every device computes the latents, and the keys and values of its own heads."""


@dataclass(frozen=True)
class LatentSize(ExpertsSize):
    """Sizes with latent attention. `head_dim` is a key's width; every head has its own keys and values."""

    query_latent: int = 0
    """Features of the query latent; 0 if queries come from the hidden states."""
    latent: int = 0
    """Features of the key/value latent."""
    rotated: int = 0
    """Rotated values of a key, which all heads share."""
    value_dim: int = 0

    @staticmethod
    def _more(config: Mapping[str, Any], of: Callable[..., int]) -> dict[str, Any]:
        rotated, heads = of("qk_rope_head_dim"), of("num_attention_heads")
        return {
            "query_latent": of("q_lora_rank") if config.get("q_lora_rank") is not None else 0,
            "latent": of("kv_lora_rank"), "rotated": rotated, "value_dim": of("v_head_dim"),
            "head_dim": of("qk_nope_head_dim") + rotated, "kv_heads": heads,
        }  # fmt: skip

    @property
    def attention_weights(self) -> int:
        built = self.heads * self.head_dim
        queries = self.query_latent * (self.hidden + built) if self.query_latent else self.hidden * built
        unrotated = self.head_dim - self.rotated + self.value_dim
        pairs = self.hidden * (self.latent + self.rotated) + self.latent * self.heads * unrotated
        return queries + pairs + self.heads * self.value_dim * self.hidden

    @property
    def cache_values(self) -> int:
        return self.layers * self.heads * (self.head_dim + self.value_dim)


LATENT_TINY: Mapping[str, Any] = {
    **tiny_without("head_dim"), "num_key_value_heads": 4, "q_lora_rank": 40,
    "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "num_hidden_layers": 2,
    "first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
    "n_shared_experts": 2, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
}  # fmt: skip
"""The common part of tiny configurations: a dense layer, then experts."""


_V2_COUNT = ("n_routed_experts", "num_experts")
_V2_DENSE = first_dense(0)


_GGUF_KEYS = ROUTED_EXPERTS | {"attention.kv_lora_rank": "kv_lora_rank", "rope.dimension_count": "qk_rope_head_dim"}
_GGUF_READS = frozenset({
    "attention.q_lora_rank", "attention.key_length_mla", "attention.value_length_mla", "expert_gating_func",
    "rope.scaling.yarn_log_multiplier", "nextn_predict_layers",
})  # fmt: skip


def _latent_gguf(facts: GgufFacts) -> dict[str, Any]:
    """Files without `key_length_mla`, of older converters, have the heads' own sizes in key_length and value_length."""
    width = facts.get("attention.key_length_mla", facts.get("attention.key_length"))
    rope, log = dict(facts.common["rope_parameters"]), facts.get("rope.scaling.yarn_log_multiplier")
    if log:
        rope |= {"mscale": float(log) * 10, "mscale_all_dim": float(log) * 10}
    return {
        "qk_nope_head_dim": width - facts.get("rope.dimension_count"), "rope_parameters": rope,
        "v_head_dim": facts.get("attention.value_length_mla", facts.get("attention.value_length")),
        "q_lora_rank": facts.get("attention.q_lora_rank"),
    }  # fmt: skip


def _v2_config(facts: GgufFacts) -> dict[str, Any]:
    grouped = facts.get("expert_group_count", 1) > 1
    return {**_latent_gguf(facts), "topk_method": "group_limited_greedy" if grouped else "greedy"}


def _is_v3(facts: GgufFacts) -> bool:
    """Whether routers score by a sigmoid."""
    return facts.get("expert_gating_func") == 2 or f"blk.{facts.get('block_count', 1) - 1}.exp_probs_b.bias" in facts


ARCHITECTURES["deepseek_v2"] = Architecture(
    summary="DeepSeek V2: latent attention, RoPE of neighbours, dense layers first, then routed and shared experts.",
    model_class="DeepseekV2ForCausalLM",
    layer_at=mixed_layers(_V2_DENSE, latent_layer, ("gate.weight", *SHARED)),
    ignored=further_layers,
    reads=frozenset({
        *READS, *_V2_COUNT, "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size",
        "first_k_dense_replace", "routed_scaling_factor", "n_group", "topk_group", "topk_method",
    }),
    allows={"scoring_func": ("softmax",), "norm_topk_prob": (False,), "moe_layer_freq": (1,)},
    harmless=frozenset({
        *PREDICTORS, "aux_loss_alpha", "seq_aux", "ep_size", "output_router_logits", "qk_head_dim",
    }),
    cache=latent_cache,
    experts=Experts(_V2_COUNT),
    sharding=LATENT_RULES,
    size=LatentSize.reading(
        _V2_COUNT, "num_experts_per_tok", "moe_intermediate_size", shared_count="n_shared_experts", dense=_V2_DENSE
    ),
    fused={"linear": 9, "rms_norm": 2},
    gguf=Gguf(
        "deepseek2", keys=_GGUF_KEYS, config=_v2_config, reads=_GGUF_READS,
        suits=lambda facts: not _is_v3(facts),
    ),
    tiny={**LATENT_TINY, "topk_method": "group_limited_greedy"},
)  # fmt: skip


_V3_COUNT = ("n_routed_experts", "num_local_experts")
_V3_DENSE = first_dense(3)


ARCHITECTURES["deepseek_v3"] = replace(
    ARCHITECTURES["deepseek_v2"],
    summary="DeepSeek V3 and R1: V2's layers with group-limited routed experts and shared experts.",
    model_class="DeepseekV3ForCausalLM",
    layer_at=mixed_layers(_V3_DENSE, latent_layer, ("gate.weight", "gate.e_score_correction_bias", *SHARED)),
    reads=frozenset({
        *READS, *_V3_COUNT, "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size",
        "first_k_dense_replace", "routed_scaling_factor", "n_group", "topk_group", "norm_topk_prob", "rope_interleave",
    }),
    allows={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)},
    experts=Experts(_V3_COUNT),
    size=LatentSize.reading(
        _V3_COUNT, "num_experts_per_tok", "moe_intermediate_size", shared_count="n_shared_experts", dense=_V3_DENSE
    ),
    gguf=Gguf(
        "deepseek2", keys=_GGUF_KEYS | {"expert_weights_norm": "norm_topk_prob"}, config=_latent_gguf,
        reads=_GGUF_READS, suits=_is_v3,
    ),
    tiny={**LATENT_TINY, "norm_topk_prob": True},
)  # fmt: skip


def _glm_layer(config: Config) -> list[str]:
    return biased_layer(config, "qkv", default=True, packed_mlp=True)


ARCHITECTURES["glm"] = Architecture(
    summary="GLM 4: gate and up are one tensor; RoPE rotates neighbours in half of each head.",
    model_class="GlmForCausalLM",
    layer=_glm_layer,
    reads=frozenset({"attention_bias", "partial_rotary_factor"}),
    sharding=PACKED_RULES,
    tiny={**TINY, "num_hidden_layers": 2, "pad_token_id": 0, "attention_bias": True, "partial_rotary_factor": 0.5},
)


ARCHITECTURES["glm4"] = replace(
    ARCHITECTURES["glm"],
    summary="GLM 4 0414: GLM's layers with a further norm on the output of each block.",
    model_class="Glm4ForCausalLM",
    layer=lambda config: [*_glm_layer(config), "post_self_attn_layernorm.weight", "post_mlp_layernorm.weight"],
    gguf=Gguf("glm4", config=attention_bias),
)


_GLM_COUNT = ("n_routed_experts", "num_local_experts")
_GLM_DENSE = first_dense(1)


ARCHITECTURES["glm4_moe"] = Architecture(
    summary="GLM 4.5 and 4.6: half of each head rotated; dense layers first, then group-limited and shared experts.",
    model_class="Glm4MoeForCausalLM",
    layer_at=mixed_layers(
        _GLM_DENSE, lambda config: biased_layer(config, "qkv", qk_norms=bool(config.get("use_qk_norm"))),
        ("gate.weight", "gate.e_score_correction_bias", *SHARED),
    ),
    ignored=further_layers,
    reads=frozenset({
        *_GLM_COUNT, "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size", "first_k_dense_replace",
        "routed_scaling_factor", "n_group", "topk_group", "norm_topk_prob", "attention_bias", "use_qk_norm",
        "partial_rotary_factor",
    }),
    harmless=frozenset({*PREDICTORS, "output_router_logits"}),
    experts=Experts(_GLM_COUNT),
    sharding=EXPERT_RULES,
    size=ExpertsSize.reading(
        _GLM_COUNT, "num_experts_per_tok", "moe_intermediate_size", shared_count="n_shared_experts", dense=_GLM_DENSE
    ),
    fused={"linear": 9, "rms_norm": 2},
    gguf=Gguf(
        "glm4moe",
        keys=ROUTED_EXPERTS | {"expert_weights_norm": "norm_topk_prob"},
        config=lambda facts: {**attention_bias(facts), "use_qk_norm": "blk.0.attn_q_norm.weight" in facts},
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


def _ernie_layer(config: Config) -> list[str]:
    return layer("qkvo" if config.get("use_bias") else "", mlp_biases=bool(config.get("use_bias")))


ARCHITECTURES["ernie4_5"] = Architecture(
    summary="ERNIE 4.5: Llama's layers with RoPE that rotates neighbours; one key adds all biases.",
    model_class="Ernie4_5ForCausalLM",
    layer=_ernie_layer,
    reads=frozenset({"use_bias"}),
    size=tied_size,
    gguf=Gguf("ernie4_5", config=lambda facts: {"use_bias": "blk.0.attn_q.bias" in facts}),
    tiny={**TINY, "num_hidden_layers": 2, "use_bias": True},
)


_ERNIE_COUNT = ("moe_num_experts", "num_experts")


def _ernie_dense(config: Config) -> Container[int]:
    """Layers outside the range with experts, and in that range all but every `moe_layer_interval`-th."""
    layers, last = int(config["num_hidden_layers"]), int(config.get("moe_layer_end_index", -1))
    sparse = range(int(config.get("moe_layer_start_index", 1)), (layers if last == -1 else last + 1))
    return {i for i in range(layers) if i not in sparse or (i + 1) % int(config.get("moe_layer_interval", 1))}


def _ernie_router(config: Config) -> list[str]:
    shared = SHARED if config.get("moe_num_shared_experts", 2) else ()
    biases = [name.replace(".weight", ".bias") for name in shared] if config.get("use_bias") else []
    return ["gate.weight", "gate.moe_statics.e_score_correction_bias", *shared, *biases]


ARCHITECTURES["ernie4_5_moe"] = Architecture(
    summary="ERNIE 4.5 with experts: ERNIE's attention; some layers have routed experts with biases, and shared ones.",
    model_class="Ernie4_5_MoeForCausalLM",
    layer_at=lambda config, i: mixed_layers(_ernie_dense, _ernie_layer, _ernie_router(config))(config, i),
    ignored=lambda config: r"model\.mtp_.+",
    reads=frozenset({
        *_ERNIE_COUNT, "moe_k", "moe_num_shared_experts", "moe_intermediate_size", "moe_layer_start_index",
        "moe_layer_end_index", "moe_layer_interval", "moe_norm_min", "use_bias",
    }),
    allows={"moe_gate": ("topk",), "moe_use_aux_free": (True,)},
    # a capacity matters in training only: transformers' experts take any number of tokens
    harmless=frozenset({
        "router_aux_loss_coef", "output_router_logits", "num_nextn_predict_layers", "moe_capacity",
    }),
    experts=Experts(_ERNIE_COUNT, "gate_up-statics"),
    sharding=EXPERT_RULES,
    size=ExpertsSize.reading(
        _ERNIE_COUNT, "moe_k", "moe_intermediate_size", shared_count="moe_num_shared_experts", dense=_ernie_dense,
        score_biases=True, tied=True,
    ),
    fused={"linear": 9, "rms_norm": 2},
    gguf=Gguf(
        "ernie4_5-moe",
        keys={
            "expert_count": "moe_num_experts", "expert_used_count": "moe_k",
            "expert_feed_forward_length": "moe_intermediate_size", "expert_shared_count": "moe_num_shared_experts",
            "leading_dense_block_count": "moe_layer_start_index", "interleave_moe_layer_step": "moe_layer_interval",
        },
        config=lambda facts: {"use_bias": "blk.0.attn_q.bias" in facts},
        neutral={"expert_shared_feed_forward_length": None},
    ),
    tiny={
        **TINY, "num_hidden_layers": 2, "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 48,
        "moe_num_shared_experts": 2, "moe_layer_start_index": 1,
    },
)  # fmt: skip


_GPT_OSS_ROUTER = ("router.weight", "router.bias", "experts.gate_up_proj_bias", "experts.down_proj_bias")


def _gpt_oss_gguf(facts: GgufFacts) -> dict[str, Any]:
    """openai/gpt-oss states `truncate`: false, which no metadata has."""
    return {
        **windows(2)(facts), **attention_bias(facts),
        "rope_parameters": {**facts.common["rope_parameters"], "truncate": False},
    }  # fmt: skip


ARCHITECTURES["gpt_oss"] = Architecture(
    summary="gpt-oss: attention with sinks, alternating windows, and clamped experts with interleaved gate and up.",
    model_class="GptOssForCausalLM",
    layer=lambda config: [*expert_layer(biased_layer(config, default=True), _GPT_OSS_ROUTER), "self_attn.sinks"],
    reads=frozenset({
        "num_local_experts", "num_experts_per_tok", "swiglu_alpha", "swiglu_limit", "sliding_window", "layer_types",
        "attention_bias",
    }),
    # rope_parameters repeats the original context; experts_per_token is an older name of num_experts_per_tok
    harmless=frozenset({
        "router_aux_loss_coef", "output_router_logits", "initial_context_length", "experts_per_token",
    }),
    cache=cache_in_turn(2, 128),
    experts=Experts(("num_local_experts",)),
    sharding=(*EXPERT_RULES, Rule("attention sinks", LAYER + r"self_attn\.sinks", 0, "num_attention_heads")),
    size=ExpertsSize.reading(("num_local_experts",), "num_experts_per_tok", biased=True),
    fused={"linear": 3, "rms_norm": 0},
    gguf=Gguf(
        "gpt-oss", keys=expert_keys("num_local_experts"),
        config=_gpt_oss_gguf, reads=WINDOWS, neutral={"expert_feed_forward_length": None}, turned_experts=True,
    ),
    tiny={
        **TINY, "num_hidden_layers": 2, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": WINDOW,
        "swiglu_limit": 0.5, "attention_bias": True,
    },
)  # fmt: skip
