"""Nemotron-H and Nemotron 3: each layer is one thing, Mamba 2, attention without positions, an MLP, or experts."""

from __future__ import annotations

from typing import Any

from llmc.compiler.architectures.shared.base import Config, Family
from llmc.compiler.architectures.shared.experts import Experts
from llmc.compiler.architectures.shared.gpt import NO_ROPE
from llmc.compiler.architectures.shared.hybrid import (
    ATTENTION,
    CountedSize,
    Mamba,
    attention_weights,
    hybrid_cache,
    mamba_layer,
)
from llmc.compiler.architectures.shared.names import Names
from llmc.compiler.architectures.shared.sharding import rules
from llmc.compiler.architectures.shared.tiny import TINY
from llmc.errors import CheckpointError
from llmc.runtime.cache_shape import CacheShape, CacheTensor, key_value

NAMES = Names(
    embedding="model.embeddings.weight", others=lambda config: ["model.norm_f.weight"], stored_base="backbone.",
)  # fmt: skip
PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""Letters of `hybrid_override_pattern`, one a layer."""
_MAMBA = ("mamba", "linear_attention")


def _types(config: Config) -> list[str]:
    named = config.get("layers_block_type") or config.get("layer_types")
    if named:
        return list(named)
    pattern = config["hybrid_override_pattern"]
    if unknown := set(pattern) - set(PATTERN):
        raise CheckpointError(
            f"config.json: hybrid_override_pattern has {''.join(sorted(unknown))!r}, which is no kind of layer; known: "
            f"{', '.join(PATTERN)}"
        )
    return [PATTERN[letter] for letter in pattern]


def _derived(config: Config) -> dict[str, Any]:
    return {"num_hidden_layers": len(_types(config))}


def _mamba(config: Config) -> Mamba:
    return Mamba(
        config["hidden_size"], config["mamba_num_heads"], config["mamba_head_dim"], config["ssm_state_size"],
        config.get("n_groups") or 8, config.get("conv_kernel") or 4,
    )  # fmt: skip


def _layer(config: Config, index: int) -> list[str]:
    kind = _types(config)[index]
    ends = ("weight", "bias") if config.get("mlp_bias") else ("weight",)
    if kind in _MAMBA:
        parts = mamba_layer(
            "mixer", convolution=bool(config.get("use_conv_bias", True)), projections=bool(config.get("use_bias"))
        )
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


def _cache(config: Config) -> CacheShape:
    def kept(index: int, kind: str) -> list[CacheTensor]:
        if kind in ATTENTION:
            width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
            return list(key_value(index, config.get("num_key_value_heads") or config["num_attention_heads"], width))
        return _mamba(config).cache(index) if kind in _MAMBA else []

    return hybrid_cache([kept(i, kind) for i, kind in enumerate(_types(config))])


def _size(config: Config, source: str) -> CountedSize:
    types, hidden = _types(config), config["hidden_size"]
    experts, width = config.get("n_routed_experts") or 0, config.get("moe_intermediate_size") or 0
    latent = config.get("moe_latent_size") or hidden
    beside = hidden * (experts + 2 * (config.get("moe_shared_expert_intermediate_size") or 0))
    beside += 2 * hidden * latent if latent != hidden else 0
    of_kind = {"mlp": 2 * hidden * config["intermediate_size"], "moe": beside}
    attending = sum(kind in ATTENTION for kind in types)
    inner = sum(of_kind.get(kind, 0) for kind in types) + attending * attention_weights(config)
    inner += sum(kind in _MAMBA for kind in types) * _mamba(config).weights
    each = types.count("moe") * 2 * latent * width
    return CountedSize.counted(
        config, source, inner=inner, expert_weights=experts * each,
        chosen_weights=min(experts, config.get("num_experts_per_tok") or 0) * each,
    )  # fmt: skip


FAMILY = Family(
    model_class="NemotronHForCausalLM",
    layer_at=_layer,
    names=NAMES,
    ignored=lambda config: r"mtp\..+",
    derived=_derived,
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
    sharding=rules(NAMES),
    size=_size,
    cache=_cache,
    fused={"linear": 11, "rms_norm": 0},
    tiny={
        **{k: v for k, v in TINY.items() if k not in ("num_hidden_layers", "rms_norm_eps")},
        "hybrid_override_pattern": "M*-E", "layer_norm_epsilon": 1e-5, "mamba_num_heads": 8, "mamba_head_dim": 16,
        "ssm_state_size": 8, "n_groups": 2, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 48, "moe_shared_expert_intermediate_size": 80, "n_group": 2, "topk_group": 1,
        "routed_scaling_factor": 2.5,
    },
)  # fmt: skip
