"""Bamba: Mamba 2's layers, between which some attend, rotated by half; each is followed by a gated MLP."""

from __future__ import annotations

from llmc.compiler.architectures.shared.base import Config, Family
from llmc.compiler.architectures.shared.hybrid import (
    CountedSize,
    Mamba,
    attention_weights,
    hybrid_cache,
    mamba_layer,
)
from llmc.compiler.architectures.shared.names import Names
from llmc.compiler.architectures.shared.sharding import rules
from llmc.compiler.architectures.shared.tiny import TINY
from llmc.runtime.cache_shape import CacheShape, key_value

NAMES = Names(others=lambda config: ["model.final_layernorm.weight"])


def _attends(config: Config, index: int) -> bool:
    return index in (config.get("attn_layer_indices") or [])


def _layer(config: Config, index: int) -> list[str]:
    if _attends(config, index):
        parts = [f"self_attn.{name}_proj.weight" for name in "qkvo"]
    else:
        convolution, projections = config.get("mamba_conv_bias", True), config.get("mamba_proj_bias", False)
        parts = mamba_layer("mamba", convolution=bool(convolution), projections=bool(projections))
    mlp = [f"feed_forward.{name}_proj.weight" for name in ("gate", "up", "down")]
    return [*parts, *mlp, "input_layernorm.weight", "pre_ff_layernorm.weight"]


def _cache(config: Config) -> CacheShape:
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    return hybrid_cache([
        key_value(i, config.get("num_key_value_heads") or heads, width) if _attends(config, i)
        else Mamba.of(config).cache(i)
        for i in range(config["num_hidden_layers"])
    ])  # fmt: skip


def _size(config: Config, source: str) -> CountedSize:
    layers = int(config["num_hidden_layers"])
    attending = sum(_attends(config, i) for i in range(layers))
    inner = attending * attention_weights(config) + (layers - attending) * Mamba.of(config).weights
    inner += layers * 3 * config["hidden_size"] * config["intermediate_size"]
    return CountedSize.counted(config, source, inner=inner)


FAMILY = Family(
    model_class="BambaForCausalLM",
    layer_at=_layer,
    names=NAMES,
    reads=frozenset({
        "attn_layer_indices", "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv",
        "mamba_expand", "mamba_conv_bias", "mamba_proj_bias", "time_step_limit", "partial_rotary_factor",
    }),
    # transformers rotates half of a head whatever the key says; half of the published models' heads is this
    allows={"attn_rotary_emb": (64,)},
    harmless=frozenset({"mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient"}),
    sharding=rules(
        NAMES, query=r"self_attn\.q_proj", keys=r"self_attn\.[kv]_proj", output=r"self_attn\.o_proj",
        up=r"feed_forward\.(?:gate|up)_proj", down=r"feed_forward\.down_proj",
    ),
    size=_size,
    cache=_cache,
    fused={"linear": 6, "rms_norm": 0},
    tiny={
        **{k: v for k, v in TINY.items() if k != "head_dim"}, "num_hidden_layers": 2, "attn_layer_indices": [1],
        "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8,
    },
)  # fmt: skip
