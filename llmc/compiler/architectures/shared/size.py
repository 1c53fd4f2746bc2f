"""Sizes of a decoder from its configuration: parameters, cache and working memory per token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from llmc.errors import CheckpointError

if TYPE_CHECKING:
    from llmc.compiler.architectures.shared.block_form import BlockForm
    from llmc.runtime.cache_shape import CacheShape


@dataclass(frozen=True)
class Weights:
    """`count` weights in one form. `stored`: block form in the checkpoint, or None. `embed_lm_head`: part of the
    embedding or lm_head. `experts`: part of experts, which few targets quantize."""

    count: int
    stored: BlockForm | None = None
    embed_lm_head: bool = False
    experts: bool = False


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a decoder with `layers` of attention (grouped heads) and an MLP.

    The MLP has `mlp_matrices` matrices: three if it is gated. `positions`: rows of a table of learned positions.
    `cache`: None for a key and a value of one size in every layer.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    mlp_matrices: int = field(default=3, kw_only=True)
    positions: int = field(default=0, kw_only=True)
    cache: CacheShape | None = field(default=None, kw_only=True)

    @classmethod
    def ungated(cls, config: Mapping[str, Any], source: str) -> ModelSize:
        """`of` a decoder whose MLP has no gate and whose positions are not learned. Raises CheckpointError."""
        return replace(cls.of(config, source), mlp_matrices=2)

    @classmethod
    def of(cls, config: Mapping[str, Any], source: str) -> ModelSize:
        """Read the sizes from a config. Raises CheckpointError, naming `source` and the field, if one is missing."""

        def size(name: str, default: int | None = None) -> int:
            value = config.get(name)
            if value is None and default is not None:
                return default
            if type(value) is not int or value < 1:
                raise CheckpointError(f"{source}: {name} is {value!r}, not a size; its memory cannot be estimated")
            return value

        hidden, heads = size("hidden_size"), size("num_attention_heads")
        return cls(
            size("num_hidden_layers"),
            hidden,
            size("intermediate_size"),
            heads,
            size("num_key_value_heads", heads),
            size("head_dim", hidden // heads),
            size("vocab_size"),
            bool(config.get("tie_word_embeddings", False)),
        )

    @property
    def parameters(self) -> int:
        """Weights in matrices; norms and biases are below a thousandth of them and not counted."""
        return sum(weights.count for weights in self.weights)

    @property
    def weights(self) -> list[Weights]:
        """The parameters, embedding and lm_head separately."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        mlp = self.mlp_matrices * self.hidden * self.intermediate
        return [Weights(self.layers * (attention + mlp) + self.positions * self.hidden), self.embed_lm_head]

    @property
    def embed_lm_head(self) -> Weights:
        return Weights((1 if self.tied else 2) * self.vocabulary * self.hidden, embed_lm_head=True)

    @property
    def cache_values(self) -> int:
        """Key and value numbers that one token adds to the cache."""
        return 2 * self.layers * self.kv_heads * self.head_dim if self.cache is None else self.cache.token_values

    @property
    def cache_heads(self) -> int:
        """Number of cached heads, keys and values counted separately."""
        return 2 * self.layers * self.kv_heads if self.cache is None else sum(t.shape[0] for t in self.cache.kv)

    @property
    def active_parameters(self) -> int:
        """Weights that one token's step reads: all without experts."""
        return self.parameters

    def state_bytes(self, value_bytes: int) -> int:
        """Bytes of one sequence's recurrent state, for any length; `value_bytes` per number without a dtype."""
        return 0 if self.cache is None else self.cache.state_bytes(value_bytes)

    @property
    def activations(self) -> int:
        """Values that one new token computes if no memory is reused: outputs of each MLP and attention, keys or values,
        logits."""
        layer = self.intermediate + self.hidden + self.kv_heads * self.head_dim
        return self.layers * layer + self.vocabulary

    @property
    def working_set(self) -> int:
        """Values of one new token that live at once, in the widest layer, if memory is reused, without logits."""
        return 3 * self.intermediate + 4 * self.hidden


def tied_size(config: Mapping[str, Any], source: str) -> ModelSize:
    """`ModelSize.of` for an architecture with tied lm_head by default."""
    return ModelSize.of({"tie_word_embeddings": True, **config}, source)


@dataclass(frozen=True)
class CountedSize(ModelSize):
    """Sizes of a model with counted weights. `inner`: all but experts, embedding and lm_head. `expert_weights`: all
    experts. `chosen_weights`: one token's experts."""

    inner: int
    expert_weights: int = 0
    chosen_weights: int = 0

    @classmethod
    def counted(cls, config: Mapping[str, Any], source: str, **counts: Any) -> Self:
        """Take the other sizes from `config`. Raises CheckpointError like `ModelSize.of`."""
        return cls(**vars(ModelSize.of(config, source)), **counts)

    def _weights(self, experts: int) -> list[Weights]:
        return [Weights(self.inner), *([Weights(experts, experts=True)] if experts else []), self.embed_lm_head]

    @property
    def weights(self) -> list[Weights]:
        return self._weights(self.expert_weights)

    @property
    def active_parameters(self) -> int:
        return sum(weights.count for weights in self._weights(self.chosen_weights))


def attention_weights(config: Mapping[str, Any]) -> int:
    """Weights of a plain layer's four projections."""
    heads = int(config["num_attention_heads"])
    width = int(config.get("head_dim") or config["hidden_size"] // heads)
    return int(config["hidden_size"]) * width * 2 * (heads + int(config.get("num_key_value_heads") or heads))
