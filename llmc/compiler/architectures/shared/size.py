"""How large a decoder is, from its configuration alone: parameters, cache and working memory of a token."""

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
    """`count` weights that are held alike.

    `stored`: the form of the blocks that the checkpoint has them in, or None. `embed_lm_head`: of the embedding or
    lm_head.    `experts`: of experts, which few targets quantise.
    """

    count: int
    stored: BlockForm | None = None
    embed_lm_head: bool = False
    experts: bool = False


@dataclass(frozen=True)
class ModelSize:
    """The sizes of a decoder: `layers` of attention (grouped heads) and an MLP, tied head or not.

    The MLP is gated, of three matrices, or of `mlp_matrices`; `positions` are the rows of a table of learned ones.
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
        """`of` a decoder whose MLP has no gate, and whose positions are not learned. Raises CheckpointError."""
        return replace(cls.of(config, source), mlp_matrices=2)

    @classmethod
    def of(cls, config: Mapping[str, Any], source: str) -> ModelSize:
        """From a model config. Raises CheckpointError, naming `source` and the field, where a size is missing."""

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
        """Weights of the matrices; norms and biases, below a thousandth of them, are not counted."""
        return sum(weights.count for weights in self.weights)

    @property
    def weights(self) -> list[Weights]:
        """The same, inner and outer ones apart."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        mlp = self.mlp_matrices * self.hidden * self.intermediate
        return [Weights(self.layers * (attention + mlp) + self.positions * self.hidden), self.embed_lm_head]

    @property
    def embed_lm_head(self) -> Weights:
        """Of the embedding, and of the head where it is not tied."""
        return Weights((1 if self.tied else 2) * self.vocabulary * self.hidden, embed_lm_head=True)

    @property
    def cache_values(self) -> int:
        """Keys and values that one token leaves in the cache."""
        return 2 * self.layers * self.kv_heads * self.head_dim if self.cache is None else self.cache.token_values

    @property
    def cache_heads(self) -> int:
        """Heads that these are of, each a key or a value."""
        return 2 * self.layers * self.kv_heads if self.cache is None else sum(t.shape[0] for t in self.cache.kv)

    @property
    def active_parameters(self) -> int:
        """Weights that one token's step reads: all, where there are no experts."""
        return self.parameters

    def state_bytes(self, value_bytes: int) -> int:
        """Bytes of the states of one sequence, which are as many for any number of its tokens; `value_bytes` for each
        number of a state that names no dtype."""
        return 0 if self.cache is None else self.cache.state_bytes(value_bytes)

    @property
    def activations(self) -> int:
        """Values that one new token makes if nothing is used twice: per layer the MLP's and attention's outputs and
        the keys or values, and the logits."""
        layer = self.intermediate + self.hidden + self.kv_heads * self.head_dim
        return self.layers * layer + self.vocabulary

    @property
    def working_set(self) -> int:
        """Values of one new token that live at once when memory is used again, in the widest layer; logits are made for
        the last token of a sequence only."""
        return 3 * self.intermediate + 4 * self.hidden


def tied_size(config: Mapping[str, Any], source: str) -> ModelSize:
    """`ModelSize.of` for a family whose head is tied unless its configuration says otherwise."""
    return ModelSize.of({"tie_word_embeddings": True, **config}, source)


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
        return [Weights(self.inner), *([Weights(experts, experts=True)] if experts else []), self.embed_lm_head]

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
