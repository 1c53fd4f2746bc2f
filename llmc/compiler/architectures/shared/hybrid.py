"""Families whose layers are of several kinds: sizes counted layer by layer, and Mamba 2's layers.

Source: transformers 5.23, configuration and modeling files of bamba, falcon_h1, granitemoehybrid and nemotron_h, whose
Mamba layers are the same code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from llmc.compiler.architectures.shared.names import with_biases
from llmc.compiler.architectures.shared.size import ModelSize, Weights
from llmc.runtime.cache_shape import CacheShape, CacheTensor

ATTENTION = ("full_attention", "attention")
"""What configurations call layers that attend; transformers 5 has the first, published ones the second."""


@dataclass(frozen=True)
class Mamba:
    """A Mamba 2 layer: `heads` of `width` values, a state [heads, width, `state`], `groups` that share B and C, and a
    convolution over `kernel` tokens."""

    hidden: int
    heads: int
    width: int
    state: int
    groups: int
    kernel: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """From the keys that most families have. `mamba_d_head` may be "auto": what is left for each head."""
        hidden, heads = int(config["hidden_size"]), int(config.get("mamba_n_heads") or 128)
        inner = int(config.get("mamba_d_ssm") or config.get("mamba_expand", 2) * hidden)
        width = config.get("mamba_d_head") or "auto"
        return cls(
            hidden, heads, inner // heads if width == "auto" else int(width), int(config.get("mamba_d_state") or 256),
            int(config.get("mamba_n_groups") or 1), int(config.get("mamba_d_conv") or 4),
        )  # fmt: skip

    @property
    def inner(self) -> int:
        """Values of all heads."""
        return self.heads * self.width

    @property
    def convolved(self) -> int:
        """Channels of the convolution: values, and B and C of each group."""
        return self.inner + 2 * self.groups * self.state

    @property
    def weights(self) -> int:
        """Of its matrices and filters."""
        return self.hidden * (2 * self.inner + self.convolved + self.heads) + self.convolved * self.kernel

    def cache(self, layer: int) -> list[CacheTensor]:
        """The last tokens of the convolution, and the state."""
        return [
            CacheTensor(layer, "conv", "state", (self.kernel - 1, self.convolved)),
            CacheTensor(layer, "recurrent", "state", (self.heads, self.width, self.state), dtype="f32"),
        ]


def mamba_layer(place: str, *, convolution: bool = True, projections: bool = False, norm: bool = True) -> list[str]:
    """Tensors of a Mamba 2 layer below `place`; which of its parts have biases, and whether it norms what it gives."""
    parts = [f"{place}.{name}" for name in ("dt_bias", "A_log", "D")]
    parts += with_biases(f"{place}.conv1d") if convolution else [f"{place}.conv1d.weight"]
    for name in ("in_proj", "out_proj"):
        parts += with_biases(f"{place}.{name}") if projections else [f"{place}.{name}.weight"]
    return [*parts, f"{place}.norm.weight"] if norm else parts


def hybrid_cache(layers: Sequence[Sequence[CacheTensor]]) -> CacheShape:
    """The cache of layers that keep these."""
    return CacheShape(len(layers), tuple(tensor for layer in layers for tensor in layer))


@dataclass(frozen=True)
class CountedSize(ModelSize):
    """Sizes of a model whose weights were counted: `inner` without experts, and of experts all and those of a token."""

    inner: int
    expert_weights: int = 0
    chosen_weights: int = 0

    @classmethod
    def counted(cls, config: Mapping[str, Any], source: str, **counts: Any) -> Self:
        """With the other sizes from `config`; raises CheckpointError as `ModelSize.of`."""
        return cls(**vars(ModelSize.of(config, source)), **counts)

    def _weights(self, experts: int) -> list[Weights]:
        return [Weights(self.inner), *([Weights(experts, experts=True)] if experts else []), self.outer]

    @property
    def weights(self) -> list[Weights]:
        """Of all experts."""
        return self._weights(self.expert_weights)

    @property
    def active_parameters(self) -> int:
        """Weights that one token's step reads."""
        return sum(weights.count for weights in self._weights(self.chosen_weights))


def attention_weights(config: Mapping[str, Any]) -> int:
    """Of a plain layer's four projections."""
    heads = int(config["num_attention_heads"])
    width = int(config.get("head_dim") or config["hidden_size"] // heads)
    return int(config["hidden_size"]) * width * 2 * (heads + int(config.get("num_key_value_heads") or heads))
