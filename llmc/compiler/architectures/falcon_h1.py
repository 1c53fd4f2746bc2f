"""Falcon-H1: each layer attends and has a Mamba 2 layer beside, over one norm; multipliers scale what they take."""

from __future__ import annotations

from llmc.compiler.architectures.shared.base import Config, Family
from llmc.compiler.architectures.shared.hybrid import (
    CountedSize,
    Mamba,
    attention_weights,
    hybrid_cache,
    mamba_layer,
)
from llmc.compiler.architectures.shared.names import Names, with_biases
from llmc.compiler.architectures.shared.sharding import rules
from llmc.compiler.architectures.shared.tiny import TINY
from llmc.runtime.cache_shape import CacheShape, key_value

NAMES = Names(others=lambda config: ["model.final_layernorm.weight"])


def _layer(config: Config) -> list[str]:
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


def _cache(config: Config) -> CacheShape:
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    kept = config.get("num_key_value_heads") or heads
    return hybrid_cache([
        [*key_value(i, kept, width), *Mamba.of(config).cache(i)] for i in range(config["num_hidden_layers"])
    ])  # fmt: skip


def _size(config: Config, source: str) -> CountedSize:
    layers = int(config["num_hidden_layers"])
    mlp = 3 * config["hidden_size"] * config["intermediate_size"]
    inner = layers * (attention_weights(config) + Mamba.of(config).weights + mlp)
    return CountedSize.counted(config, source, inner=inner)


FAMILY = Family(
    model_class="FalconH1ForCausalLM",
    layer=_layer,
    names=NAMES,
    reads=frozenset({
        "mamba_d_ssm", "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv",
        "mamba_expand", "mamba_conv_bias", "mamba_proj_bias", "mamba_rms_norm", "mamba_norm_before_gate",
        "time_step_limit", "projectors_bias", "attention_bias", "mlp_bias", "lm_head_multiplier",
        "embedding_multiplier", "mlp_multipliers", "key_multiplier", "attention_out_multiplier",
        "attention_in_multiplier", "ssm_multipliers", "ssm_in_multiplier", "ssm_out_multiplier",
    }),
    allows={"mamba_use_mlp": (True,), "attn_layer_indices": (None,), "rope_scaling": (None,)},
    harmless=frozenset({"mamba_chunk_size", "num_logits_to_keep", "mlp_expansion_factor"}),
    sharding=rules(
        NAMES, query=r"self_attn\.q_proj", keys=r"self_attn\.[kv]_proj", output=r"self_attn\.o_proj",
        up=r"feed_forward\.(?:gate|up)_proj", down=r"feed_forward\.down_proj",
    ),
    size=_size,
    cache=_cache,
    fused={"linear": 6, "rms_norm": 0},
    tiny={
        **TINY, "num_hidden_layers": 2, "mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2,
        "mamba_d_state": 8, "mamba_rms_norm": True, "embedding_multiplier": 3.0, "lm_head_multiplier": 0.5,
        "mlp_multipliers": [0.9, 0.7], "key_multiplier": 0.5, "attention_out_multiplier": 0.8,
        "ssm_multipliers": [0.9, 0.8, 0.7, 1.1, 1.2], "ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.6,
    },
)  # fmt: skip
