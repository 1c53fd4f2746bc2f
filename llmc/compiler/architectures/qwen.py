"""Qwen's models. Up to Qwen3 every layer attends; from Qwen3-Next on some do, the others use the gated delta rule
(frontend/recurrent.py). Source: transformers 5.23, configuration and modeling files of qwen3_5 and qwen3_next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

from llmc.compiler.architectures.shared.base import TINY, Architecture, tiny_without
from llmc.compiler.architectures.shared.cache import Config, attention_cache, late_window_cache
from llmc.compiler.architectures.shared.experts import (
    EXPERT_RULES,
    Experts,
    ExpertsSize,
    expert_layer,
    mixed_layers,
    not_sparse,
)
from llmc.compiler.architectures.shared.gguf_form import Gguf, expert_keys
from llmc.compiler.architectures.shared.names import biased_layer, layer
from llmc.compiler.architectures.shared.sharding import LAYER, RULES, Rule
from llmc.compiler.architectures.shared.size import CountedSize, ModelSize, Weights
from llmc.runtime.cache_shape import CacheShape, CacheTensor, key_value

LINEAR, FULL = "linear_attention", "full_attention"
DEFAULTS: Mapping[str, int] = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "head_dim": 256,
}  # fmt: skip


DELTA_READS = frozenset({"layer_types", "partial_rotary_factor", *(set(DEFAULTS) - {"head_dim"})})


DELTA_RULES = (
    *RULES,
    # queries, keys and values follow each other in one matrix: no split by rows keeps whole heads
    Rule("gated delta rule", LAYER + r"linear_attn\.[\w.]+", None),
)


TINY_DELTA: Mapping[str, Any] = {
    "num_hidden_layers": 2, "layer_types": [LINEAR, FULL], "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 8,
}  # fmt: skip


def types(config: Mapping[str, Any]) -> list[str]:
    """The type of each layer; by default every fourth one attends."""
    interval = config.get("full_attention_interval", 4)
    count = range(int(config["num_hidden_layers"]))
    return list(config.get("layer_types") or [FULL if (i + 1) % interval == 0 else LINEAR for i in count])


APART = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
TOGETHER = ("in_proj_qkvz", "in_proj_ba")
"""Input projections of a delta-rule layer: Qwen3.5's matrices (APART), and Qwen3-Next's."""


def delta_layer(config: Mapping[str, Any], index: int, projections: Sequence[str] = APART) -> list[str]:
    """Tensors of a layer with a dense MLP."""
    parts = biased_layer(config, qk_norms=True)
    if types(config)[index] == FULL:
        return parts
    built = (*projections, "conv1d", "norm", "out_proj")
    own = [*(f"linear_attn.{name}.weight" for name in built), "linear_attn.dt_bias", "linear_attn.A_log"]
    return own + [part for part in parts if not part.startswith("self_attn.")]


def delta_cache(config: Mapping[str, Any]) -> CacheShape:
    """Keys and values of layers that attend; the last convolution inputs and the recurrent state of the others."""
    given = {**DEFAULTS, **{k: v for k, v in config.items() if v is not None}}
    keys = given["linear_num_key_heads"] * given["linear_key_head_dim"]
    heads, width = given["linear_num_value_heads"], given["linear_value_head_dim"]
    convolved = (given["linear_conv_kernel_dim"] - 1, 2 * keys + heads * width)
    tensors: list[CacheTensor] = []
    for i, kind in enumerate(types(config)):
        if kind == FULL:
            tensors += key_value(i, given.get("num_key_value_heads") or given["num_attention_heads"], given["head_dim"])
        else:
            tensors.append(CacheTensor(i, "conv", "state", convolved))
            state = (heads, given["linear_key_head_dim"], width)
            tensors.append(CacheTensor(i, "recurrent", "state", state, dtype="f32"))
    return CacheShape(len(types(config)), tuple(tensors))


@dataclass(frozen=True)
class DeltaSize(ModelSize):
    """Sizes of a model in which `attending` layers attend. The other layers project each token to `projected` values,
    have `valued` values in all heads, and `filters` convolution weights."""

    attending: int
    projected: int
    valued: int
    filters: int

    @classmethod
    def of(cls, config: Mapping[str, Any], source: str) -> Self:
        given = {**DEFAULTS, **{k: v for k, v in config.items() if v is not None}}
        plain = ModelSize.of(given, source)
        keys = given["linear_num_key_heads"] * given["linear_key_head_dim"]
        valued = given["linear_num_value_heads"] * given["linear_value_head_dim"]
        projected = 2 * keys + 2 * valued + 2 * given["linear_num_value_heads"]
        filters = (2 * keys + valued) * given["linear_conv_kernel_dim"]
        attending = types(given).count(FULL)
        return cls(**vars(plain), attending=attending, projected=projected, valued=valued, filters=filters)

    @property
    def weights(self) -> list[Weights]:
        return [Weights(self.mixing + self.layers * 3 * self.hidden * self.intermediate), self.embed_lm_head]

    @property
    def mixing(self) -> int:
        """Weights of all layers without their MLPs; queries include a gate of their size."""
        attention = self.hidden * self.head_dim * (3 * self.heads + 2 * self.kv_heads)
        linear = self.hidden * (self.projected + self.valued) + self.filters
        return self.attending * attention + (self.layers - self.attending) * linear


_SHARED = [f"shared_expert.{name}_proj.weight" for name in ("gate", "up", "down")]
EXPERT_READS = DELTA_READS | {
    "num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size", "attention_bias",
}  # fmt: skip
TINY_EXPERTS: Mapping[str, Any] = {
    **TINY_DELTA, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80,
}  # fmt: skip


def expert_delta_layer(config: Mapping[str, Any], index: int, projections: Sequence[str] = APART) -> list[str]:
    """Tensors of a layer with experts, and a gated MLP that all tokens use."""
    parts = delta_layer(config, index, projections)
    return expert_layer(parts, ("gate.weight", "shared_expert_gate.weight", *_SHARED))


def expert_delta_size(config: Mapping[str, Any], source: str) -> CountedSize:
    """Sizes of a model with such layers. Raises CheckpointError."""
    features = "moe_intermediate_size"
    plain = DeltaSize.of({**config, "intermediate_size": config.get(features)}, source)
    experts, shared = int(config["num_experts"]), int(config.get("shared_expert_intermediate_size") or 0)
    beside = plain.hidden * (experts + 1 + 3 * shared)
    each = plain.layers * 3 * plain.hidden * plain.intermediate
    chosen = min(experts, int(config["num_experts_per_tok"]))
    return CountedSize.counted(
        {**config, "head_dim": plain.head_dim, "intermediate_size": chosen * plain.intermediate + shared}, source,
        inner=plain.mixing + plain.layers * beside, expert_weights=experts * each, chosen_weights=chosen * each,
    )  # fmt: skip


ARCHITECTURES: dict[str, Architecture] = {}

_EXPERT_KEYS = expert_keys("num_experts") | {"expert_feed_forward_length": "moe_intermediate_size"}
"""Metadata of GGUF files."""

ARCHITECTURES["qwen2"] = Architecture(
    summary="Qwen2 and Qwen2.5: q, k and v always have biases.",
    model_class="Qwen2ForCausalLM",
    layer=lambda config: layer("qkv"),
    reads=frozenset({"layer_types", "sliding_window", "use_sliding_window", "max_window_layers"}),
    allows={"attention_bias": (True,)},
    cache=late_window_cache,
    gguf=Gguf("qwen2"),
    tiny=TINY,
)


ARCHITECTURES["qwen2_moe"] = Architecture(
    summary="Qwen2 with experts: biases on q, k and v; experts, and a gated MLP that all tokens use.",
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
    # effective only with use_sliding_window, which is refused
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
    gguf=Gguf(
        "qwen2moe",
        keys=_EXPERT_KEYS | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        config=lambda facts: {"norm_topk_prob": False},
    ),
    tiny={
        **TINY, "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80, "mlp_only_layers": [1],
    },
)  # fmt: skip


ARCHITECTURES["qwen3"] = Architecture(
    summary="Qwen3: queries and keys are normalised before the rotation; their projections stay separate when fused.",
    model_class="Qwen3ForCausalLM",
    layer=lambda config: biased_layer(config, qk_norms=True),
    reads=frozenset({"layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "attention_bias"}),
    cache=late_window_cache,
    fused={"linear": 6, "rms_norm": 2},
    gguf=Gguf("qwen3"),
    tiny=TINY,
)


def _cache(config: Config) -> CacheShape:
    """All layers have the window, or none."""
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    return attention_cache({**config, "sliding_window": window})


ARCHITECTURES["qwen3_moe"] = Architecture(
    summary="Qwen3 with experts: Qwen3's attention, and MLPs of which each token uses some.",
    model_class="Qwen3MoeForCausalLM",
    layer_at=mixed_layers(not_sparse, lambda config: biased_layer(config, qk_norms=True), ("gate.weight",)),
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
    gguf=Gguf("qwen3moe", keys=_EXPERT_KEYS, config=lambda facts: {"norm_topk_prob": True}),
    tiny={
        **TINY, "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    },
)  # fmt: skip


ARCHITECTURES["qwen3_next"] = Architecture(
    summary="Qwen3-Next: the gated delta rule, gated attention in every fourth layer, experts and a shared one.",
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


ARCHITECTURES["qwen3_5_text"] = Architecture(
    summary="Qwen3.5's text part: the gated delta rule, gated attention in every fourth layer; norms add 1.",
    model_class="Qwen3_5ForCausalLM",
    layer_at=delta_layer,
    reads=DELTA_READS | {"attention_bias"},
    sharding=DELTA_RULES,
    size=DeltaSize.of,
    cache=delta_cache,
    tiny={**TINY, **TINY_DELTA},
)


ARCHITECTURES["qwen3_5_moe_text"] = replace(
    ARCHITECTURES["qwen3_next"],
    summary="Qwen3.5's text part with experts: its layers, each with many small MLPs and one that all tokens use.",
    model_class="Qwen3_5MoeForCausalLM",
    layer_at=expert_delta_layer,
    unread=frozenset({"intermediate_size"}),
    reads=EXPERT_READS,
    allows={},
    harmless=frozenset({"router_aux_loss_coef", "output_router_logits"}),
    tiny={**tiny_without("intermediate_size"), **TINY_EXPERTS},
)
