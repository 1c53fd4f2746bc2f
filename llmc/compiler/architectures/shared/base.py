"""The contract of a family: one `Architecture` says all that llmc knows of a model type beside its code.

The code of a model is transformers' own, traced unmodified. Defaults are those of a plain decoder (Llama's layers
without biases), so that a family states what differs. Families are part of keys: the key of every result that reads a
family has the sources of all families in `code` (compiler/code.py).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from llmc.compiler.architectures.shared.cache import attention_cache
from llmc.compiler.architectures.shared.experts import Experts
from llmc.compiler.architectures.shared.names import GGUF_LAYER, GGUF_TOP, Names, layer
from llmc.compiler.architectures.shared.sharding import RULES, Rule
from llmc.compiler.architectures.shared.size import ModelSize
from llmc.errors import CheckpointError
from llmc.runtime.cache_shape import CacheShape

Config: TypeAlias = Mapping[str, Any]
"""A configuration in the terms of config.json, as `Checkpoint.config` has it."""


NO_ROPE = frozenset({"rope_parameters", "rope_theta"})
"""Common keys that a model without rotary positions does not read."""

WINDOW = 5
"""A sliding window that is shorter than every sequence of the tests."""

TINY: Mapping[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}  # fmt: skip
"""What the families' tiny configurations have in common: grouped heads, and no two equal sizes that could be confused.
"""


def tied_by_default(config: Config) -> dict[str, Any]:
    """For `Architecture.derived`: the head is tied unless config.json says otherwise."""
    return {"tie_word_embeddings": config.get("tie_word_embeddings", True)}


def tiny_without(*names: str) -> dict[str, Any]:
    """TINY without keys that a family does not have."""
    return {name: value for name, value in TINY.items() if name not in names}


@dataclass(frozen=True)
class Gguf:
    """How GGUF files hold a family. Source: llama.cpp's convert_hf_to_gguf.py, and the gguf package's tables."""

    architecture: str
    """The file's general.architecture."""
    top: Mapping[str, str] = field(default_factory=lambda: GGUF_TOP)
    """Tensors outside layers: whole name in the file → whole name in transformers."""
    layer: Mapping[str, str] = field(default_factory=lambda: GGUF_LAYER)
    """Tensors of a layer: `NAME` of `blk.3.NAME.weight` → `PART` of `model.layers.3.PART.weight`; biases too."""
    interleaved: tuple[str, ...] = ()
    """Projections ("q_proj", …) whose rows [heads · head_dim, …] the file has in llama.cpp's order, which rotates
    neighbours (2i, 2i + 1) of a head where transformers rotates (i, i + head_dim / 2)."""
    config: Callable[[Container[str]], dict[str, Any]] = lambda tensors: {}
    """Members of config.json that follow from which tensors the file has, by the file's names."""
    refused: tuple[str, ...] = ("expert_count", "attention.sliding_window")
    """Metadata, behind the architecture's name, that make it another model unless they are 0."""

    def transformers_name(self, name: str) -> str | None:
        """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`; None where there is none."""
        if name in self.top:
            return self.top[name]
        parts = name.split(".")
        if len(parts) == 4 and parts[0] == "blk" and parts[2] in self.layer and parts[3] in ("weight", "bias"):
            return f"model.layers.{parts[1]}.{self.layer[parts[2]]}.{parts[3]}"
        return None


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A model type. Source: transformers' configuration and modeling files of it, which tests hold this to."""

    model_class: str
    """transformers' class of the causal language model, which configurations name in `architectures`."""
    summary: str = ""
    """What sets it apart, for docs/models.md."""
    layer: Callable[[Config], list[str]] = lambda config: layer()
    """Tensors of one layer, without `model.layers.N.`; a checkpoint with further tensors is refused."""
    layer_at: Callable[[Config, int], list[str]] | None = None
    """The same of layer N (from 0), where layers have different ones; `layer` is not asked then."""
    names: Names = field(default_factory=Names)
    """What the list of layers, the embedding and the head are called, and the other tensors outside layers."""
    computed: tuple[str, ...] = ()
    """Ends of names of tensors that published checkpoints have and that the configuration determines (causal masks)."""
    ignored: Callable[[Config], str | None] = lambda config: None
    """A pattern of whole names of tensors that checkpoints have for what is not compiled (layers that predict further
    tokens), by configuration."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Common keys of config.json → what its config.json calls them: {"hidden_size": "n_embd"}. Source: transformers'
    `attribute_map`, and what the model reads."""
    derived: Callable[[Config], Mapping[str, Any]] = lambda config: {}
    """Common keys that its config.json says in other words, from a configuration that has `keys` in common terms:
    {"intermediate_size": 4 · hidden_size}. None stands for a key that is not known."""
    unread: frozenset[str] = frozenset()
    """Common keys (shared/config_keys.py, READ) that its model does not read: a configuration that has one is refused.
    """
    reads: frozenset[str] = frozenset()
    """Keys of config.json that its model reads beside those that all read (shared/config_keys.py)."""
    rope: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Members of rope_parameters that its model reads, by type ("dynamic"), beside those of all
    (shared/config_keys.py, ROPE)."""
    allows: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys that it does not read, with the values that ask for what llmc does without them, where these differ from
    those for all families. Any other value is refused."""
    harmless: frozenset[str] = frozenset()
    """Keys that change no number that is compiled, beside those for all."""
    turned: frozenset[str] = frozenset()
    """Last parts of the names of modules whose weights are [in, out], transformers' Conv1D."""
    gguf: Gguf | None = None
    """How GGUF files hold it; None where they do not, or say that it is another family."""
    experts: Experts | None = None
    """How many experts a layer has, and how checkpoints hold them; None for a model without."""
    sharding: tuple[Rule, ...] = RULES
    """How weights are split over devices. Patterns exclude each other, and name every weight."""
    size: Callable[[Config, str], ModelSize] = ModelSize.of
    """(config, its source) → parameters, cache and working memory; raises CheckpointError where a size is missing."""
    cache: Callable[[Config], CacheShape] = attention_cache
    """The tensors that a model keeps of the tokens before (runtime/cache_shape.py): keys and values with their windows,
    and states."""
    fused: Mapping[str, int] = field(default_factory=lambda: {"linear": 4, "rms_norm": 0})
    """Operators of a layer that fusing leaves (program/fuse.py matches arithmetic): 4 linear ones are the packed q, k
    and v, o, the packed gate and up, and down; norms that take in a residual do not count."""
    tiny: Mapping[str, Any]
    """The smallest configuration that has all features of this family, for tests, without vocab_size. At most two
    layers, four where each is one thing: attention, an MLP.
    """

    def in_common_terms(self, config: Config) -> dict[str, Any]:
        """`config` with the common keys beside its own. One that has them stays as it is.

        Raises CheckpointError where a size that others follow from is missing, or is none.
        """
        common = {**config, **{name: config[own] for name, own in self.keys.items() if own in config}}
        try:
            return {**common, **{k: v for k, v in self.derived(common).items() if v is not None}}
        except (KeyError, TypeError, ArithmeticError) as e:
            kind = config.get("model_type")
            raise CheckpointError(f"config.json: the sizes of a {kind} model cannot be read: {e!r}") from e

    def tensor_names(self, config: Config) -> set[str]:
        """Names of all tensors of the model of `config`, which is in common terms; a tied head's too."""
        found = {self.names.embedding, self.names.head, *self.names.others(config)}
        for i in range(int(config["num_hidden_layers"])):
            parts = self.layer_at(config, i) if self.layer_at else self.layer(config)
            found |= {f"{self.names.layers}.{i}.{part}" for part in parts}
        return found
