"""Mamba's first form: each channel has a state of its own, and how it fades and what it takes follow from the token.

Source: transformers 5.23, configuration and modeling files of mamba, falcon_mamba and jamba, whose layers are the same
code but for norms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmc.compiler.architectures.shared.base import Config
from llmc.compiler.architectures.shared.gpt import NO_ROPE
from llmc.compiler.architectures.shared.hybrid import CountedSize, hybrid_cache
from llmc.compiler.architectures.shared.names import Names, with_biases
from llmc.runtime.cache_shape import CacheShape, CacheTensor

BACKBONE = Names(
    "backbone.layers", "backbone.embeddings.weight", others=lambda config: ["backbone.norm_f.weight"],
    stored={"backbone.embedding.weight": "backbone.embeddings.weight"},
)  # fmt: skip
"""Models of Mamba layers alone; the first published ones have another name of the embedding (`load_hook`)."""
UNREAD = NO_ROPE | {
    "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "intermediate_size",
    "max_position_embeddings",
}  # fmt: skip
"""Common keys that models of Mamba layers alone do not read."""
READS = frozenset({"state_size", "conv_kernel", "expand", "use_bias", "use_conv_bias", "layer_norm_epsilon"})
ALLOWS: Mapping[str, tuple[Any, ...]] = {"rms_norm": (True,), "ssm_cfg": ({},), "residual_in_fp32": (True, False)}
"""Steps are in float32, as residuals are where `residual_in_fp32` asks for it."""
HARMLESS = frozenset({
    "d_model", "d_inner", "n_layer", "fused_add_norm", "pad_vocab_size_multiple", "rescale_prenorm_residual",
    "time_step_scale", "time_step_min", "time_step_max", "time_step_floor", "time_step_init_scheme", "use_mambapy",
    "use_falcon_mambapy", "use_associative_scan",
})  # fmt: skip
"""Beginnings of weights in training, names of what other keys say, and choices among equal computations."""


@dataclass(frozen=True)
class Selective:
    """A layer of `inner` channels with `state` values each, a convolution over `kernel` tokens, and steps that come
    from `rank` features."""

    hidden: int
    inner: int
    state: int
    rank: int
    kernel: int

    @classmethod
    def of(cls, hidden: int, expand: float, state: int, rank: int | str | None, kernel: int) -> Selective:
        """From a configuration's values; the rank "auto" is a sixteenth of the hidden size, rounded up."""
        steps = -(-hidden // 16) if rank in (None, "auto") else int(rank or 0)
        return cls(hidden, int(expand * hidden), state, steps, kernel)

    @property
    def weights(self) -> int:
        """Of its matrices and filters."""
        into_out, chosen = 3 * self.hidden * self.inner, self.inner * (2 * self.rank + 2 * self.state)
        return into_out + chosen + self.inner * (self.kernel + self.state)

    def cache(self, layer: int) -> list[CacheTensor]:
        """The last tokens of the convolution, and the state, whose heads are channels."""
        return [
            CacheTensor(layer, "conv", "state", (self.kernel - 1, self.inner)),
            CacheTensor(layer, "recurrent", "state", (self.inner, 1, self.state), dtype="f32"),
        ]


def selective_layer(place: str, *, convolution: bool = True, projections: bool = False) -> list[str]:
    """Tensors of such a layer below `place`; which of its parts have biases."""
    parts = [f"{place}.{name}" for name in ("A_log", "D", "x_proj.weight")] + with_biases(f"{place}.dt_proj")
    parts += with_biases(f"{place}.conv1d") if convolution else [f"{place}.conv1d.weight"]
    for name in ("in_proj", "out_proj"):
        parts += with_biases(f"{place}.{name}") if projections else [f"{place}.{name}.weight"]
    return parts


def of_backbone(config: Config) -> Selective:
    """The layers of a model that has no others."""
    return Selective.of(
        config["hidden_size"], config.get("expand") or 2, config.get("state_size") or 16, config.get("time_step_rank"),
        config.get("conv_kernel") or 4,
    )  # fmt: skip


def backbone_layer(config: Config) -> list[str]:
    """Tensors of a layer of such a model."""
    convolution, projections = config.get("use_conv_bias", True), config.get("use_bias", False)
    return ["norm.weight", *selective_layer("mixer", convolution=bool(convolution), projections=bool(projections))]


def backbone_cache(config: Config) -> CacheShape:
    """What such a model keeps: states alone."""
    return hybrid_cache([of_backbone(config).cache(i) for i in range(config["num_hidden_layers"])])


def backbone_size(config: Config, source: str) -> CountedSize:
    """Sizes of such a model; raises CheckpointError."""
    return counted_backbone(config, source, of_backbone(config).weights, of_backbone(config).inner)


def counted_backbone(config: Config, source: str, layer: int, inner: int) -> CountedSize:
    """Sizes of a model whose layers have `layer` weights and `inner` channels, and none attends."""
    plain = {**config, "intermediate_size": inner, "num_attention_heads": 1}
    return CountedSize.counted(plain, source, inner=config["num_hidden_layers"] * layer)
