"""The contract of an architecture: one `Architecture` states everything that llmc knows of a model type.

The model's code is transformers' own, traced unmodified. Defaults describe a plain decoder (Llama's layers without
biases), so an architecture states only differences. Architectures are part of keys: every result that reads one has the
sources of all of them in `code` (compiler/code.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from llmc.compiler.architectures.shared.cache import Config, attention_cache
from llmc.compiler.architectures.shared.experts import Experts
from llmc.compiler.architectures.shared.gguf_form import Gguf
from llmc.compiler.architectures.shared.names import Names, layer
from llmc.compiler.architectures.shared.sharding import RULES, Rule
from llmc.compiler.architectures.shared.size import ModelSize
from llmc.errors import CheckpointError
from llmc.runtime.cache_shape import CacheShape

NO_ROPE = frozenset({"rope_parameters", "rope_theta"})
"""Common keys that a model without rotary positions does not read."""

WINDOW = 5
"""A sliding window shorter than every test sequence."""

TINY: Mapping[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}  # fmt: skip
"""The common part of tiny configurations: grouped heads, and all sizes differ so that none can be confused."""


def tied_by_default(config: Config) -> dict[str, Any]:
    """For `Architecture.derived`: lm_head is tied unless config.json says otherwise."""
    return {"tie_word_embeddings": config.get("tie_word_embeddings", True)}


def tiny_without(*names: str) -> dict[str, Any]:
    """TINY without keys that an architecture does not have."""
    return {name: value for name, value in TINY.items() if name not in names}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A model type. Source: transformers' configuration and modeling files, against which tests check it."""

    model_class: str
    """transformers' class of the causal language model, as in `architectures` of config.json."""
    summary: str = ""
    """Models, a colon, and the differences from others; docs/models.md shows the part before the colon."""
    layer: Callable[[Config], list[str]] = lambda config: layer()
    """Tensors of one layer, without `model.layers.N.`; a checkpoint with further tensors is refused."""
    layer_at: Callable[[Config, int], list[str]] | None = None
    """The tensors of layer N (from 0), if layers differ; replaces `layer`."""
    names: Names = field(default_factory=Names)
    """Names of the layer list, the embedding, lm_head, and the other tensors outside layers."""
    computed: tuple[str, ...] = ()
    """Suffixes of stored tensors that follow from the configuration (causal masks)."""
    ignored: Callable[[Config], str | None] = lambda config: None
    """A pattern of full names of stored tensors that are not compiled (multi-token prediction layers), by
    configuration."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Common keys of config.json → this architecture's names: {"hidden_size": "n_embd"}. Source: transformers'
    `attribute_map`, and what the model reads."""
    derived: Callable[[Config], Mapping[str, Any]] = lambda config: {}
    """Computes common keys that config.json states differently: {"intermediate_size": 4 · hidden_size}. Its argument
    has `keys` in common terms; a value of None stands for an unknown key."""
    unread: frozenset[str] = frozenset()
    """Common keys (frontend/consumed.py, READ) that the model does not read; a configuration with one is refused."""
    reads: frozenset[str] = frozenset()
    """Config keys specific to this architecture, besides the common ones (frontend/consumed.py)."""
    rope: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Members of rope_parameters specific to this architecture, by type ("dynamic"); see frontend/consumed.py, ROPE.
    """
    allows: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Unread keys → the values that match llmc's behaviour, if they differ from the common ones. Other values are
    refused."""
    harmless: frozenset[str] = frozenset()
    """Keys specific to this architecture that change no compiled value."""
    turned: frozenset[str] = frozenset()
    """Last name parts of modules with weights [in, out], transformers' Conv1D."""
    gguf: Gguf | None = None
    """The form in GGUF files; None if there is none, or if files declare another architecture."""
    experts: Experts | None = None
    """Number of experts per layer, and their form in checkpoints; None for a model without experts."""
    sharding: tuple[Rule, ...] = RULES
    """How weights are split over devices. Patterns are exclusive and match every weight."""
    size: Callable[[Config, str], ModelSize] = ModelSize.of
    """(config, its source) → parameters, cache and working memory. Raises CheckpointError if a size is missing."""
    cache: Callable[[Config], CacheShape] = attention_cache
    """The tensors that a model keeps of earlier tokens (runtime/cache_shape.py): keys and values with their windows,
    and recurrent state."""
    fused: Mapping[str, int] = field(default_factory=lambda: {"linear": 4, "rms_norm": 0})
    """Operators that remain in a layer after fusion (program/fuse.py). 4 linear ones are packed q, k and v; o; packed
    gate and up; down. Norms that take in a residual do not count."""
    tiny: Mapping[str, Any]
    """The smallest configuration with all features of this architecture, for tests, without vocab_size. It has at most
    two layers, or four if each layer is a single block (attention, an MLP)."""

    def in_common_terms(self, config: Config) -> dict[str, Any]:
        """Add the common keys to `config`; existing ones stay. Raises CheckpointError if a size from which others
        follow is missing or invalid."""
        common = {**config, **{name: config[own] for name, own in self.keys.items() if own in config}}
        try:
            return {**common, **{k: v for k, v in self.derived(common).items() if v is not None}}
        except (KeyError, TypeError, ArithmeticError) as e:
            kind = config.get("model_type")
            raise CheckpointError(f"config.json: the sizes of a {kind} model cannot be read: {e!r}") from e

    def tensor_names(self, config: Config) -> set[str]:
        """Names of all tensors of the model of `config`, in common terms; a tied lm_head included. Raises
        CheckpointError for a configuration from which they do not follow."""
        try:
            found = {self.names.embedding, self.names.lm_head, *self.names.others(config)}
            for i in range(int(config["num_hidden_layers"])):
                parts = self.layer_at(config, i) if self.layer_at else self.layer(config)
                found |= {f"{self.names.layers}.{i}.{part}" for part in parts}
        except (KeyError, TypeError, ValueError, ArithmeticError) as e:
            kind = config.get("model_type")
            raise CheckpointError(f"config.json: the layers of a {kind} model cannot be read: {e!r}") from e
        return found
