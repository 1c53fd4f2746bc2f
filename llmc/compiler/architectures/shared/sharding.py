"""Which dimension of each weight is split over devices, in tensor parallelism.

The rules follow Megatron-LM (Shoeybi et al., 2019, section 3). q, k, v, gate and up are split by output rows in whole
heads, o and down by input columns, so that each attention and each MLP needs one all-reduce. Embedding and lm_head are
split by vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llmc.compiler.architectures.shared.names import Names

Count = Callable[[Mapping[str, Any]], int]
"""A number that follows from a configuration."""


@dataclass(frozen=True)
class Rule:
    """How weights whose full name matches `pattern` are split; `dim` counts from a single layer's first dimension."""

    name: str
    pattern: str
    dim: int | None
    """0 for output rows, 1 for input columns, None if every device holds the whole weight."""
    parts: str | Count | None = None
    """The key of config.json with the number of parts that must stay whole, or a function that counts them."""
    noun: str = ""
    """Name of those parts."""
    affected: str = ""
    """The weights that are replicated if the devices do not divide these parts."""


def of_layer(layers: str) -> str:
    """A pattern of the prefix of layers' weights; `layers` is the name of the layer list, "model.layers"."""
    return re.escape(layers) + r"\.(?:\d+|\*)\."


LAYER = of_layer("model.layers")
_QUERY = ("num_attention_heads", "query heads", "q_proj and o_proj")
_KEYS = ("num_key_value_heads", "key/value heads", "k_proj, v_proj and the cache")
_MLP = ("intermediate_size", "MLP features", "gate_proj, up_proj and down_proj")
_VOCABULARY = ("vocab_size", "vocabulary rows", "embed_tokens and lm_head")

RULES = (
    Rule("query heads", LAYER + r"self_attn\.q_proj\.(?:weight|bias)", 0, *_QUERY),
    Rule("key/value heads", LAYER + r"self_attn\.[kv]_proj\.(?:weight|bias)", 0, *_KEYS),
    Rule("attention output", LAYER + r"self_attn\.o_proj\.weight", 1, *_QUERY),
    Rule("mlp input", LAYER + r"mlp\.(?:gate|up)_proj\.(?:weight|bias)", 0, *_MLP),
    Rule("mlp output", LAYER + r"mlp\.down_proj\.weight", 1, *_MLP),
    Rule("vocabulary", r"model\.embed_tokens\.weight|lm_head\.(?:weight|bias)", 0, *_VOCABULARY),
    Rule("biases of sums", LAYER + r"(?:self_attn\.o_proj|mlp\.down_proj)\.bias", None),
    Rule("norms", rf"(?:{LAYER}(?:self_attn\.)?|model\.)\w*norm\.(?:weight|bias)", None),
    Rule("tables", r"model\.rotary_emb\.\w+|model\.embed_tokens\w*\.embed_scale", None),
)  # fmt: skip
"""A plain decoder's rules. Patterns match full names and are exclusive."""

PACKED_RULES = (
    *RULES,
    Rule("packed query, key and value heads", LAYER + r"self_attn\.qkv_proj\.(?:weight|bias)", 0, *_KEYS),
    Rule("packed mlp input", LAYER + r"mlp\.gate_up_proj\.(?:weight|bias)", 0, *_MLP),
)
"""The rules if q, k and v, or gate and up, are one tensor. Devices share its rows evenly, so parts of an output change
devices after the matmul. XLA moves them, which costs less than a copy of the weight on each device."""


PROJECTIONS = {"query": r"self_attn\.q_proj", "keys": r"self_attn\.[kv]_proj", "output": r"self_attn\.o_proj"}
"""Attention modules of most architectures, for `rules`."""


def rules(
    names: Names, query: str = "", keys: str = "", output: str = "", up: str = "", down: str = "",
    features: str | Count = _MLP[0],
) -> tuple[Rule, ...]:  # fmt: skip
    """The rules of an architecture with other names.

    Each argument is a pattern of a layer's modules ("self_attn.q_proj"), except `features`, an MLP's `Rule.parts`.
    Weights that no pattern matches are replicated: norms, biases of sums, and projections with queries, keys and values
    in one.
    """
    layer = of_layer(names.layers)
    vocabulary = "|".join(re.escape(name) for name in (names.embedding, names.lm_head)) + r"|lm_head\.bias"
    mlp = (features, *_MLP[1:])
    split = [Rule("vocabulary", vocabulary, 0, *_VOCABULARY)]
    for name, modules, ends, dim, parts in (
        ("query heads", query, "weight|bias", 0, _QUERY), ("key/value heads", keys, "weight|bias", 0, _KEYS),
        ("attention output", output, "weight", 1, _QUERY), ("mlp input", up, "weight|bias", 0, mlp),
        ("mlp output", down, "weight", 1, mlp),
    ):  # fmt: skip
        if modules:
            split.append(Rule(name, rf"{layer}(?:{modules})\.(?:{ends})", dim, *parts))
    others = "|".join(f"(?:{rule.pattern})$" for rule in split)
    return (*split, Rule("all else", rf"(?!{others}).+", None))
