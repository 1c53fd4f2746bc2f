"""Mamba 2: layers of the second form alone, whose heads share how they fade, and no keys and values."""

from __future__ import annotations

from llmc.compiler.architectures.shared import selective
from llmc.compiler.architectures.shared.base import Config, Family
from llmc.compiler.architectures.shared.hybrid import CountedSize, Mamba, hybrid_cache, mamba_layer
from llmc.compiler.architectures.shared.sharding import rules
from llmc.runtime.cache_shape import CacheShape


def _mamba(config: Config) -> Mamba:
    return Mamba(
        config["hidden_size"], config.get("num_heads") or 128, config.get("head_dim") or 64,
        config.get("state_size") or 128, config.get("n_groups") or 8, config.get("conv_kernel") or 4,
    )  # fmt: skip


def _layer(config: Config) -> list[str]:
    convolution, projections = config.get("use_conv_bias", True), config.get("use_bias", False)
    return ["norm.weight", *mamba_layer("mixer", convolution=bool(convolution), projections=bool(projections))]


def _cache(config: Config) -> CacheShape:
    return hybrid_cache([_mamba(config).cache(i) for i in range(config["num_hidden_layers"])])


def _size(config: Config, source: str) -> CountedSize:
    return selective.counted_backbone(config, source, _mamba(config).weights, _mamba(config).inner)


FAMILY = Family(
    model_class="Mamba2ForCausalLM",
    layer=_layer,
    names=selective.BACKBONE,
    unread=selective.UNREAD - {"head_dim"},
    reads=selective.READS | {"num_heads", "n_groups", "time_step_limit"},
    allows={**selective.ALLOWS, "norm_before_gate": (True,)},
    harmless=selective.HARMLESS | {"chunk_size", "time_step_rank", "intermediate_size"},
    sharding=rules(selective.BACKBONE),
    size=_size,
    cache=_cache,
    fused={"linear": 2, "rms_norm": 0},
    tiny={
        "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 2,
        "time_step_limit": [0.01, 2.0],
    },
)  # fmt: skip
