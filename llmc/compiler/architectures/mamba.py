"""Models with Mamba layers, some with attention layers between them.

In Mamba 1 layers (`Selective`) each channel has its own state, and its decay and input depend on the token. In Mamba 2
layers (`Mamba`), the channels of a head share their decay. Source: transformers 5.23, configuration and modeling files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from llmc.compiler.architectures.llama import SCALES
from llmc.compiler.architectures.shared.base import NO_ROPE, TINY, Architecture, tied_by_default, tiny_without
from llmc.compiler.architectures.shared.cache import ATTENTION, Config, attention_layer, hybrid_cache
from llmc.compiler.architectures.shared.experts import Experts, expert_layer
from llmc.compiler.architectures.shared.gguf_form import Gguf, GgufFacts, expert_keys
from llmc.compiler.architectures.shared.names import Names, with_biases
from llmc.compiler.architectures.shared.sharding import PROJECTIONS, rules
from llmc.compiler.architectures.shared.size import CountedSize, attention_weights
from llmc.errors import CheckpointError
from llmc.runtime.cache_shape import CacheShape, CacheTensor


@dataclass(frozen=True)
class Mamba:
    """A Mamba 2 layer: `heads` of `width` values, a recurrent state [heads, width, `state`], `groups` that share B and
    C, and a convolution over `kernel` tokens."""

    hidden: int
    heads: int
    width: int
    state: int
    groups: int
    kernel: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Read the keys that most architectures have; `mamba_d_head` may be "auto": inner size / heads."""
        hidden, heads = int(config["hidden_size"]), int(config.get("mamba_n_heads") or 128)
        inner = int(config.get("mamba_d_ssm") or config.get("mamba_expand", 2) * hidden)
        width = config.get("mamba_d_head") or "auto"
        return cls(
            hidden, heads, inner // heads if width == "auto" else int(width), int(config.get("mamba_d_state") or 256),
            int(config.get("mamba_n_groups") or 1), int(config.get("mamba_d_conv") or 4),
        )  # fmt: skip

    @property
    def inner(self) -> int:
        return self.heads * self.width

    @property
    def convolved(self) -> int:
        """Channels of the convolution: values, and B and C of each group."""
        return self.inner + 2 * self.groups * self.state

    @property
    def weights(self) -> int:
        return self.hidden * (2 * self.inner + self.convolved + self.heads) + self.convolved * self.kernel

    def cache(self, layer: int) -> list[CacheTensor]:
        return [
            CacheTensor(layer, "conv", "state", (self.kernel - 1, self.convolved)),
            CacheTensor(layer, "recurrent", "state", (self.heads, self.width, self.state), dtype="f32"),
        ]


def mamba_layer(inner: str, *, convolution: bool, projections: bool, norm: bool = True) -> list[str]:
    """Tensors of a Mamba 2 layer below `inner`. The flags say which parts have biases, and if the output has a norm."""
    parts = [f"{inner}.{name}" for name in ("dt_bias", "A_log", "D")] + _around(inner, convolution, projections)
    return [*parts, f"{inner}.norm.weight"] if norm else parts


def _around(inner: str, convolution: bool, projections: bool) -> list[str]:
    parts = with_biases(f"{inner}.conv1d") if convolution else [f"{inner}.conv1d.weight"]
    for name in ("in_proj", "out_proj"):
        parts += with_biases(f"{inner}.{name}") if projections else [f"{inner}.{name}.weight"]
    return parts


def _biases(config: Config, prefix: str = "mamba_") -> dict[str, bool]:
    projections = "mamba_proj_bias" if prefix else "use_bias"
    return {
        "convolution": bool(config.get(f"{prefix or 'use_'}conv_bias", True)),
        "projections": bool(config.get(projections, False)),
    }


BACKBONE = Names(
    "backbone.layers", "backbone.embeddings.weight", others=lambda config: ["backbone.norm_f.weight"],
    stored={"backbone.embedding.weight": "backbone.embeddings.weight"},
)  # fmt: skip
"""Names of models with Mamba layers only. The first published ones have another name of the embedding (`load_hook`)."""
UNREAD = NO_ROPE | {
    "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "intermediate_size",
    "max_position_embeddings",
}  # fmt: skip
"""Common keys that models with Mamba layers only do not read."""
READS = frozenset({"state_size", "conv_kernel", "expand", "use_bias", "use_conv_bias", "layer_norm_epsilon"})
ALLOWS: Mapping[str, tuple[Any, ...]] = {"rms_norm": (True,), "ssm_cfg": ({},), "residual_in_fp32": (True, False)}
"""Steps are in float32, and so are residuals if `residual_in_fp32` is set."""
HARMLESS = frozenset({
    "d_model", "d_inner", "n_layer", "fused_add_norm", "pad_vocab_size_multiple", "rescale_prenorm_residual",
    "time_step_scale", "time_step_min", "time_step_max", "time_step_floor", "time_step_init_scheme", "use_mambapy",
    "use_falcon_mambapy", "use_associative_scan",
})  # fmt: skip
"""Initial values of weights, duplicates of other keys, and choices among equivalent implementations."""


@dataclass(frozen=True)
class Selective:
    """A Mamba 1 layer of `inner` channels with `state` values each, a convolution over `kernel` tokens, and step sizes
    from `rank` features."""

    hidden: int
    inner: int
    state: int
    rank: int
    kernel: int

    @classmethod
    def of(cls, hidden: int, expand: float, state: int, rank: int | str | None, kernel: int) -> Selective:
        """Rank "auto" is a sixteenth of the hidden size, rounded up."""
        steps = -(-hidden // 16) if rank in (None, "auto") else int(rank or 0)
        return cls(hidden, int(expand * hidden), state, steps, kernel)

    @property
    def weights(self) -> int:
        into_out, chosen = 3 * self.hidden * self.inner, self.inner * (2 * self.rank + 2 * self.state)
        return into_out + chosen + self.inner * (self.kernel + self.state)

    def cache(self, layer: int) -> list[CacheTensor]:
        return [
            CacheTensor(layer, "conv", "state", (self.kernel - 1, self.inner)),
            CacheTensor(layer, "recurrent", "state", (self.inner, 1, self.state), dtype="f32"),
        ]


def selective_layer(inner: str, *, convolution: bool, projections: bool) -> list[str]:
    """Tensors of a Mamba 1 layer below `inner`. The flags say which parts have biases."""
    parts = [f"{inner}.{name}" for name in ("A_log", "D", "x_proj.weight")] + with_biases(f"{inner}.dt_proj")
    return parts + _around(inner, convolution, projections)


def _mixed_cache(config: Config, attends: Sequence[bool], layer: Mamba | Selective) -> CacheShape:
    """Keys and values of layers that attend, and the recurrent state of the others."""
    return hybrid_cache([attention_layer(config, i) if sees else layer.cache(i) for i, sees in enumerate(attends)])


def _backbone_cache(config: Config, layer: Mamba | Selective) -> CacheShape:
    return _mixed_cache(config, [False] * config["num_hidden_layers"], layer)


def _backbone_size(config: Config, source: str, layer: Mamba | Selective) -> CountedSize:
    """Sizes of a model with such layers only. Raises CheckpointError."""
    plain = {**config, "intermediate_size": layer.inner, "num_attention_heads": 1}
    return CountedSize.counted(plain, source, inner=config["num_hidden_layers"] * layer.weights)


ARCHITECTURES: dict[str, Architecture] = {}


_SSM = {"ssm.conv_kernel": "conv_kernel", "ssm.state_size": "state_size"}
_SSM_READS = frozenset({"ssm.inner_size", "ssm.dt_b_c_rms", "ssm.group_count", "ssm.time_step_rank"})
"""Metadata of GGUF files."""


def _gguf_config(facts: GgufFacts) -> dict[str, Any]:
    return {
        "expand": facts.get("ssm.inner_size") // facts.common["hidden_size"],
        "use_bias": "blk.0.ssm_in.bias" in facts, "use_conv_bias": "blk.0.ssm_conv1d.bias" in facts,
    }  # fmt: skip


_MAMBA_GGUF = Gguf(
    "mamba", keys=_SSM | {"ssm.time_step_rank": "time_step_rank"}, config=_gguf_config, reads=_SSM_READS,
    suits=lambda facts: not facts.get("ssm.dt_b_c_rms"),
)  # fmt: skip


def _mamba(config: Config) -> Selective:
    return Selective.of(
        config["hidden_size"], config.get("expand") or 2, config.get("state_size") or 16, config.get("time_step_rank"),
        config.get("conv_kernel") or 4,
    )  # fmt: skip


ARCHITECTURES["mamba"] = Architecture(
    summary="Mamba: only Mamba 1 layers, with recurrent state and no KV cache.",
    model_class="MambaForCausalLM",
    layer=lambda config: ["norm.weight", *selective_layer("mixer", **_biases(config, ""))],
    names=BACKBONE,
    derived=tied_by_default,
    unread=UNREAD,
    reads=READS | {"time_step_rank"},
    allows=ALLOWS,
    harmless=HARMLESS | {"intermediate_size"},
    sharding=rules(BACKBONE),
    size=lambda config, source: _backbone_size(config, source, _mamba(config)),
    cache=lambda config: _backbone_cache(config, _mamba(config)),
    fused={"linear": 3, "rms_norm": 0},
    gguf=_MAMBA_GGUF,
    tiny={"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8, "use_bias": True},
)


ARCHITECTURES["falcon_mamba"] = replace(
    ARCHITECTURES["mamba"],
    summary="Falcon Mamba: Mamba's layers, with norms without weights over B, C and the step sizes.",
    model_class="FalconMambaForCausalLM",
    reads=READS | {"time_step_rank", "mixer_rms_eps"},
    gguf=replace(_MAMBA_GGUF, suits=lambda facts: bool(facts.get("ssm.dt_b_c_rms"))),
    tiny={"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8, "tie_word_embeddings": False},
)


def _mamba2(config: Config) -> Mamba:
    return Mamba(
        config["hidden_size"], config.get("num_heads") or 128, config.get("head_dim") or 64,
        config.get("state_size") or 128, config.get("n_groups") or 8, config.get("conv_kernel") or 4,
    )  # fmt: skip


ARCHITECTURES["mamba2"] = Architecture(
    summary="Mamba 2: only Mamba 2 layers, whose heads share their decay; no KV cache.",
    model_class="Mamba2ForCausalLM",
    layer=lambda config: ["norm.weight", *mamba_layer("mixer", **_biases(config, ""))],
    names=BACKBONE,
    unread=UNREAD - {"head_dim"},
    reads=READS | {"num_heads", "n_groups", "time_step_limit"},
    allows={**ALLOWS, "norm_before_gate": (True,)},
    harmless=HARMLESS | {"chunk_size", "time_step_rank", "intermediate_size"},
    sharding=rules(BACKBONE),
    size=lambda config, source: _backbone_size(config, source, _mamba2(config)),
    cache=lambda config: _backbone_cache(config, _mamba2(config)),
    fused={"linear": 2, "rms_norm": 0},
    gguf=Gguf(
        "mamba2", keys=_SSM | {"ssm.time_step_rank": "num_heads", "ssm.group_count": "n_groups"},
        config=lambda facts: {
            **_gguf_config(facts), "head_dim": facts.get("ssm.inner_size") // facts.get("ssm.time_step_rank"),
        },
        reads=_SSM_READS,
    ),
    tiny={
        "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 2,
        "time_step_limit": [0.01, 2.0],
    },
)  # fmt: skip


_FINAL_NORM = Names(others=lambda config: ["model.final_layernorm.weight"])
_FEED_FORWARD_RULES = rules(
    _FINAL_NORM, **PROJECTIONS, up=r"feed_forward\.(?:gate|up)_proj", down=r"feed_forward\.down_proj"
)


def _bamba_attends(config: Config) -> list[bool]:
    return [i in (config.get("attn_layer_indices") or []) for i in range(config["num_hidden_layers"])]


def _bamba_layer(config: Config, index: int) -> list[str]:
    if _bamba_attends(config)[index]:
        parts = [f"self_attn.{name}_proj.weight" for name in "qkvo"]
    else:
        parts = mamba_layer("mamba", **_biases(config))
    mlp = [f"feed_forward.{name}_proj.weight" for name in ("gate", "up", "down")]
    return [*parts, *mlp, "input_layernorm.weight", "pre_ff_layernorm.weight"]


def _bamba_size(config: Config, source: str) -> CountedSize:
    layers, attending = int(config["num_hidden_layers"]), sum(_bamba_attends(config))
    inner = attending * attention_weights(config) + (layers - attending) * Mamba.of(config).weights
    inner += layers * 3 * config["hidden_size"] * config["intermediate_size"]
    return CountedSize.counted(config, source, inner=inner)


ARCHITECTURES["bamba"] = Architecture(
    summary="Bamba: Mamba 2's layers and some attention with half of each head rotated; a gated MLP after each.",
    model_class="BambaForCausalLM",
    layer_at=_bamba_layer,
    names=_FINAL_NORM,
    reads=frozenset({
        "attn_layer_indices", "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv",
        "mamba_expand", "mamba_conv_bias", "mamba_proj_bias", "time_step_limit", "partial_rotary_factor",
    }),
    # transformers always rotates half of a head, which is this value in the published models
    allows={"attn_rotary_emb": (64,)},
    harmless=frozenset({"mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient"}),
    sharding=_FEED_FORWARD_RULES,
    size=_bamba_size,
    cache=lambda config: _mixed_cache(config, _bamba_attends(config), Mamba.of(config)),
    fused={"linear": 6, "rms_norm": 0},
    tiny={
        **tiny_without("head_dim"), "num_hidden_layers": 2, "attn_layer_indices": [1],
        "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8,
    },
)  # fmt: skip


def _falcon_h1_layer(config: Config) -> list[str]:
    parts = mamba_layer(
        "mamba", convolution=bool(config.get("mamba_conv_bias", True)),
        projections=bool(config.get("mamba_proj_bias") or config.get("projectors_bias")),
        norm=bool(config.get("mamba_rms_norm", False)),
    )  # fmt: skip
    for names, biased in (
        ([f"self_attn.{name}_proj" for name in "qkvo"], config.get("attention_bias")),
        ([f"feed_forward.{name}_proj" for name in ("gate", "up", "down")], config.get("mlp_bias")),
    ):
        parts += with_biases(*names) if biased else [f"{name}.weight" for name in names]
    return [*parts, "input_layernorm.weight", "pre_ff_layernorm.weight"]


def _falcon_h1_cache(config: Config) -> CacheShape:
    layers = range(config["num_hidden_layers"])
    return hybrid_cache([[*attention_layer(config, i), *Mamba.of(config).cache(i)] for i in layers])


def _falcon_h1_size(config: Config, source: str) -> CountedSize:
    layers = int(config["num_hidden_layers"])
    mlp = 3 * config["hidden_size"] * config["intermediate_size"]
    inner = layers * (attention_weights(config) + Mamba.of(config).weights + mlp)
    return CountedSize.counted(config, source, inner=inner)


ARCHITECTURES["falcon_h1"] = Architecture(
    summary="Falcon-H1: each layer runs attention and Mamba 2 in parallel on one norm; multipliers scale their inputs.",
    model_class="FalconH1ForCausalLM",
    layer=_falcon_h1_layer,
    names=_FINAL_NORM,
    reads=frozenset({
        "mamba_d_ssm", "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv",
        "mamba_expand", "mamba_conv_bias", "mamba_proj_bias", "mamba_rms_norm", "mamba_norm_before_gate",
        "time_step_limit", "projectors_bias", "attention_bias", "mlp_bias", "lm_head_multiplier",
        "embedding_multiplier", "mlp_multipliers", "key_multiplier", "attention_out_multiplier",
        "attention_in_multiplier", "ssm_multipliers", "ssm_in_multiplier", "ssm_out_multiplier",
    }),
    allows={"mamba_use_mlp": (True,), "attn_layer_indices": (None,), "rope_scaling": (None,)},
    harmless=frozenset({"mamba_chunk_size", "num_logits_to_keep", "mlp_expansion_factor"}),
    sharding=_FEED_FORWARD_RULES,
    size=_falcon_h1_size,
    cache=_falcon_h1_cache,
    fused={"linear": 6, "rms_norm": 0},
    tiny={
        **TINY, "num_hidden_layers": 2, "mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2,
        "mamba_d_state": 8, "mamba_rms_norm": True, "embedding_multiplier": 3.0, "lm_head_multiplier": 0.5,
        "mlp_multipliers": [0.9, 0.7], "key_multiplier": 0.5, "attention_out_multiplier": 0.8,
        "ssm_multipliers": [0.9, 0.8, 0.7, 1.1, 1.2], "ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.6,
    },
)  # fmt: skip


def _granite_attends(config: Config) -> list[bool]:
    named = config.get("layer_types") or config.get("layers_block_type")
    return [kind in ATTENTION for kind in named or ["mamba"] * config["num_hidden_layers"]]


def _granite_layer(config: Config, index: int) -> list[str]:
    if _granite_attends(config)[index]:
        ends = ("weight", "bias") if config.get("attention_bias") else ("weight",)
        parts = [f"self_attn.{name}_proj.{end}" for name in "qkvo" for end in ends]
    else:
        parts = mamba_layer("mamba", **_biases(config))
    parts += ["shared_mlp.input_linear.weight", "shared_mlp.output_linear.weight"]
    parts += ["input_layernorm.weight", "post_attention_layernorm.weight"]
    return expert_layer(parts, ("router.weight",), "block_sparse_moe") if config.get("num_local_experts") else parts


def _granite_size(config: Config, source: str) -> CountedSize:
    types, hidden = _granite_attends(config), config["hidden_size"]
    experts = config.get("num_local_experts") or 0
    shared = config.get("shared_intermediate_size") or 1024
    inner = sum(attention_weights(config) if attends else Mamba.of(config).weights for attends in types)
    inner += len(types) * hidden * (3 * shared + experts)
    each = len(types) * 3 * hidden * config["intermediate_size"]
    return CountedSize.counted(
        config, source, inner=inner, expert_weights=experts * each,
        chosen_weights=min(experts, config.get("num_experts_per_tok") or 0) * each,
    )  # fmt: skip


_GRANITE_KEYS = SCALES | expert_keys("num_local_experts") | {
    "expert_shared_feed_forward_length": "shared_intermediate_size", "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state", "ssm.group_count": "mamba_n_groups", "ssm.time_step_rank": "mamba_n_heads",
}  # fmt: skip


def _granite_gguf(facts: GgufFacts) -> dict[str, Any]:
    """A layer without KV heads is recurrent. Files without experts have their MLP as a plain one."""
    inner = facts.get("ssm.inner_size")
    dense = {
        "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": facts.common["intermediate_size"],
    }  # fmt: skip
    return {
        **({} if facts.get("expert_count") else dense), "mamba_d_head": inner // facts.get("ssm.time_step_rank"),
        "mamba_expand": inner // facts.common["hidden_size"],
        "layer_types": ["attention" if heads else "mamba" for heads in facts.get("attention.head_count_kv")],
        "position_embedding_type": "rope" if facts.get("rope.scaling.finetuned", True) else "nope",
        "mamba_conv_bias": "blk.0.ssm_conv1d.bias" in facts, "mamba_proj_bias": "blk.0.ssm_in.bias" in facts,
        "attention_bias": False,
    }  # fmt: skip


ARCHITECTURES["granitemoehybrid"] = Architecture(
    summary="Granite 4: Mamba 2's layers and some attention, with or without positions; experts and a shared MLP.",
    model_class="GraniteMoeHybridForCausalLM",
    layer_at=_granite_layer,
    reads=frozenset({
        "num_local_experts", "num_experts_per_tok", "shared_intermediate_size", "embedding_multiplier",
        "attention_multiplier", "residual_multiplier", "logits_scaling", "attention_bias", "position_embedding_type",
        "layer_types", "layers_block_type", "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state",
        "mamba_d_conv", "mamba_expand", "mamba_conv_bias", "mamba_proj_bias", "time_step_limit",
    }),
    allows={"normalization_function": ("rmsnorm",), "init_method": ("mup",)},
    harmless=frozenset({"router_aux_loss_coef", "output_router_logits", "mamba_chunk_size"}),
    experts=Experts(("num_local_experts",), "linear"),
    sharding=rules(Names(), **PROJECTIONS),
    size=_granite_size,
    cache=lambda config: _mixed_cache(config, _granite_attends(config), Mamba.of(config)),
    fused={"linear": 7, "rms_norm": 0},
    gguf=Gguf(
        "granitehybrid", keys=_GRANITE_KEYS, config=_granite_gguf,
        reads=_SSM_READS | {"rope.scaling.finetuned"}, interleaved=True,
        suits=lambda facts: "attention.scale" in facts.metadata,
    ),
    tiny={
        **tiny_without("head_dim"), "num_hidden_layers": 2,
        "layer_types": ["mamba", "attention"], "num_local_experts": 8, "num_experts_per_tok": 2,
        "shared_intermediate_size": 48, "embedding_multiplier": 12.0, "attention_multiplier": 0.2,
        "residual_multiplier": 0.3, "logits_scaling": 6.0, "position_embedding_type": "rope", "mamba_n_heads": 8,
        "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8,
    },
)  # fmt: skip


def _jamba_attends(config: Config) -> list[bool]:
    every, first = config.get("attn_layer_period", 8), config.get("attn_layer_offset", 4)
    return [i % every == first for i in range(config["num_hidden_layers"])]


def _jamba_experts(config: Config, index: int) -> int:
    """Number of experts of a layer; 0 for an MLP, which also replaces a single expert."""
    count = int(config.get("num_experts", 16))
    every, first = config.get("expert_layer_period", 2), config.get("expert_layer_offset", 1)
    return count if count > 1 and index % every == first else 0


def _jamba_mamba(config: Config) -> Selective:
    return Selective.of(
        config["hidden_size"], config.get("mamba_expand", 2), config.get("mamba_d_state", 16),
        config.get("mamba_dt_rank"), config.get("mamba_d_conv", 4),
    )  # fmt: skip


def _jamba_layer(config: Config, index: int) -> list[str]:
    if _jamba_attends(config)[index]:
        parts = [f"self_attn.{name}_proj.weight" for name in "qkvo"]
    else:
        parts = selective_layer("mamba", **_biases(config))
        parts += [f"mamba.{name}_layernorm.weight" for name in ("dt", "b", "c")]
    if _jamba_experts(config, index):
        mlp = ["router.weight", "experts.gate_up_proj", "experts.down_proj"]
    else:
        mlp = [f"{name}_proj.weight" for name in ("gate", "up", "down")]
    return [*parts, *(f"feed_forward.{name}" for name in mlp), "input_layernorm.weight", "pre_ff_layernorm.weight"]


def _jamba_size(config: Config, source: str) -> CountedSize:
    layers = range(int(config["num_hidden_layers"]))
    mlp = 3 * config["hidden_size"] * config["intermediate_size"]
    experts = [_jamba_experts(config, i) for i in layers]
    attending = sum(_jamba_attends(config))
    inner = attending * attention_weights(config) + (len(layers) - attending) * _jamba_mamba(config).weights
    inner += sum(count * config["hidden_size"] if count else mlp for count in experts)
    chosen = sum(min(count, config.get("num_experts_per_tok", 2)) for count in experts)
    return CountedSize.counted(
        config, source, inner=inner, expert_weights=sum(experts) * mlp, chosen_weights=chosen * mlp
    )


ARCHITECTURES["jamba"] = Architecture(
    summary="Jamba: Mamba 1's layers and some attention without positions; experts in every other layer.",
    model_class="JambaForCausalLM",
    layer_at=_jamba_layer,
    names=_FINAL_NORM,
    unread=NO_ROPE | {"max_position_embeddings"},
    reads=frozenset({
        "attn_layer_period", "attn_layer_offset", "expert_layer_period", "expert_layer_offset", "num_experts",
        "num_experts_per_tok", "mamba_d_state", "mamba_d_conv", "mamba_expand", "mamba_dt_rank", "mamba_conv_bias",
        "mamba_proj_bias",
    }),
    allows={"mamba_inner_layernorms": (True,), "sliding_window": (None,)},
    harmless=frozenset({
        "max_position_embeddings", "num_logits_to_keep", "output_router_logits", "router_aux_loss_coef",
        "use_mamba_kernels", "use_mambapy", "use_associative_scan", "calc_logits_for_entire_prompt", "n_ctx",
    }),
    experts=Experts(("num_experts",)),
    sharding=rules(_FINAL_NORM, **PROJECTIONS),
    size=_jamba_size,
    cache=lambda config: _mixed_cache(config, _jamba_attends(config), _jamba_mamba(config)),
    fused={"linear": 6, "rms_norm": 0},
    tiny={
        **tiny_without("head_dim", "max_position_embeddings"), "num_hidden_layers": 2,
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 0,
        "num_experts": 8, "num_experts_per_tok": 2, "mamba_d_state": 8,
    },
)  # fmt: skip


_NEMOTRON_NAMES = Names(
    embedding="model.embeddings.weight", others=lambda config: ["model.norm_f.weight"], stored_base="backbone.",
)  # fmt: skip
_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""Letters of `hybrid_override_pattern`, one per layer."""
_MAMBA = ("mamba", "linear_attention")


def _nemotron_types(config: Config) -> list[str]:
    named = config.get("layers_block_type") or config.get("layer_types")
    if named:
        return list(named)
    pattern = config["hybrid_override_pattern"]
    if unknown := set(pattern) - set(_PATTERN):
        raise CheckpointError(
            f"config.json: hybrid_override_pattern has {''.join(sorted(unknown))!r}, which is not a layer type; known: "
            f"{', '.join(_PATTERN)}"
        )
    return [_PATTERN[letter] for letter in pattern]


def _nemotron_mamba(config: Config) -> Mamba:
    return Mamba(
        config["hidden_size"], config["mamba_num_heads"], config["mamba_head_dim"], config["ssm_state_size"],
        config.get("n_groups") or 8, config.get("conv_kernel") or 4,
    )  # fmt: skip


def _nemotron_layer(config: Config, index: int) -> list[str]:
    kind = _nemotron_types(config)[index]
    ends = ("weight", "bias") if config.get("mlp_bias") else ("weight",)
    if kind in _MAMBA:
        parts = mamba_layer("mixer", **_biases(config, ""))
    elif kind in ATTENTION:
        parts = [f"mixer.{name}_proj.weight" for name in "qkvo"]
    elif kind == "mlp":
        parts = [f"mixer.{name}_proj.{end}" for name in ("up", "down") for end in ends]
    else:
        parts = ["mixer.gate.weight", "mixer.gate.e_score_correction_bias"]
        parts += ["mixer.experts.up_proj", "mixer.experts.down_proj"]
        parts += [f"mixer.shared_experts.{name}_proj.{end}" for name in ("up", "down") for end in ends]
        if config.get("moe_latent_size"):
            parts += [f"mixer.fc{i}_latent_proj.{end}" for i in (1, 2) for end in ends]
    return ["norm.weight", *parts]


def _nemotron_cache(config: Config) -> CacheShape:
    def kept(index: int, kind: str) -> list[CacheTensor]:
        if kind in ATTENTION:
            return attention_layer(config, index)
        return _nemotron_mamba(config).cache(index) if kind in _MAMBA else []

    return hybrid_cache([kept(i, kind) for i, kind in enumerate(_nemotron_types(config))])


def _nemotron_size(config: Config, source: str) -> CountedSize:
    types, hidden = _nemotron_types(config), config["hidden_size"]
    experts, width = config.get("n_routed_experts") or 0, config.get("moe_intermediate_size") or 0
    latent = config.get("moe_latent_size") or hidden
    beside = hidden * (experts + 2 * (config.get("moe_shared_expert_intermediate_size") or 0))
    beside += 2 * hidden * latent if latent != hidden else 0
    of_kind = {"mlp": 2 * hidden * config["intermediate_size"], "moe": beside}
    attending = sum(kind in ATTENTION for kind in types)
    inner = sum(of_kind.get(kind, 0) for kind in types) + attending * attention_weights(config)
    inner += sum(kind in _MAMBA for kind in types) * _nemotron_mamba(config).weights
    each = types.count("moe") * 2 * latent * width
    return CountedSize.counted(
        config, source, inner=inner, expert_weights=experts * each,
        chosen_weights=min(experts, config.get("num_experts_per_tok") or 0) * each,
    )  # fmt: skip


ARCHITECTURES["nemotron_h"] = Architecture(
    summary="Nemotron-H and Nemotron 3: each layer is one of Mamba 2, attention without positions, MLP or experts.",
    model_class="NemotronHForCausalLM",
    layer_at=_nemotron_layer,
    names=_NEMOTRON_NAMES,
    ignored=lambda config: r"mtp\..+",
    derived=lambda config: {"num_hidden_layers": len(_nemotron_types(config))},
    unread=NO_ROPE | {"hidden_act", "rms_norm_eps"},
    reads=frozenset({
        "hybrid_override_pattern", "layers_block_type", "layer_types", "layer_norm_epsilon", "mlp_hidden_act",
        "mlp_bias", "use_bias", "mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel",
        "use_conv_bias", "mamba_hidden_act", "mamba_proj_bias", "time_step_limit", "n_routed_experts",
        "num_experts_per_tok", "moe_intermediate_size", "moe_shared_expert_intermediate_size", "moe_latent_size",
        "n_shared_experts", "routed_scaling_factor", "n_group", "topk_group", "norm_topk_prob",
    }),
    allows={"residual_in_fp32": (False,), "sliding_window": (None,), "attention_bias": (False,)},
    harmless=frozenset({
        "chunk_size", "expand", "num_logits_to_keep", "rescale_prenorm_residual", "use_mamba_kernels",
        "mamba_ssm_cache_dtype", "time_step_min", "time_step_max", "time_step_floor", "num_nextn_predict_layers",
        "mtp_layers_block_type", "mtp_hybrid_override_pattern", "moe_shared_expert_overlap", "output_router_logits",
    }),
    experts=Experts(("n_routed_experts",), "up_down"),
    sharding=rules(_NEMOTRON_NAMES),
    size=_nemotron_size,
    cache=_nemotron_cache,
    fused={"linear": 11, "rms_norm": 0},
    tiny={
        **tiny_without("num_hidden_layers", "rms_norm_eps"),
        "hybrid_override_pattern": "M*-E", "layer_norm_epsilon": 1e-5, "mamba_num_heads": 8, "mamba_head_dim": 16,
        "ssm_state_size": 8, "n_groups": 2, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 48, "moe_shared_expert_intermediate_size": 80, "n_group": 2, "topk_group": 1,
        "routed_scaling_factor": 2.5,
    },
)  # fmt: skip
