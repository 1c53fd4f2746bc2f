"""How GGUF files hold an architecture: metadata, names of tensors, and the order of rows.

Source: llama.cpp's converters (conversion/), its models (src/models/), which have some values built in, and the gguf
package's tables of names.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any

from llmc.compiler.architectures.shared.cache import SLIDING

FULL = "full_attention"


@dataclass(frozen=True)
class GgufFacts:
    """What a file states of its model."""

    metadata: Mapping[str, Any]
    """Metadata of the architecture, without its prefix: Python values, and NumPy arrays."""
    tensors: Container[str]
    """Names of the file's tensors."""
    common: Mapping[str, Any]
    """The members of config.json that all architectures have."""

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(key, default)

    def __contains__(self, tensor: str) -> bool:
        return tensor in self.tensors


Config = Callable[[GgufFacts], Mapping[str, Any]]


@dataclass(frozen=True)
class Gguf:
    """How GGUF files hold an architecture."""

    architecture: str
    """The file's general.architecture."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Metadata, without the architecture's prefix → keys of config.json, besides those of all architectures."""
    config: Config = lambda facts: {}
    """Further members of config.json."""
    reads: frozenset[str] = frozenset()
    """Metadata that `config` reads."""
    neutral: Mapping[str, tuple[Any, ...] | None] = field(default_factory=dict)
    """Unread metadata → the values that match the model; None: any value."""
    interleaved: bool = False
    """Whether rows [heads · head_dim, …] of q_proj and k_proj are in llama.cpp's order. It rotates neighbours (2i, 2i +
    1) of a head where transformers rotates (i, i + head_dim / 2)."""
    rows: Callable[[Mapping[str, Any], str], list[int] | None] = lambda config, name: None
    """(configuration, transformers' name) → for each row of transformers' tensor, its row in the file; None: alike."""
    turned_experts: bool = False
    """Whether transformers has experts as [E, K, N] with gate and up in turn, which files have as [E, N, K] each."""
    norm_offset: float = 0
    """What the file's norm weights have more than transformers'. Gemma's and Nemotron's models add 1 to them."""
    suits: Callable[[GgufFacts], bool] = lambda facts: True
    """Of several architectures with one general.architecture, whether a file is of this one; `common` is empty."""


def biases(facts: GgufFacts) -> dict[str, Any]:
    """Whether attention and MLP have biases, by the file's tensors."""
    return {**attention_bias(facts), "mlp_bias": "blk.0.ffn_up.bias" in facts}


def attention_bias(facts: GgufFacts) -> dict[str, Any]:
    """Whether attention has biases, by the file's tensors."""
    return {"attention_bias": "blk.0.attn_q.bias" in facts}


def expert_keys(count: str) -> dict[str, str]:
    """`keys` of a model with experts, whose number config.json has as `count`."""
    return {"expert_count": count, "expert_used_count": "num_experts_per_tok"}


ROUTED_EXPERTS = {
    **expert_keys("n_routed_experts"), "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts", "leading_dense_block_count": "first_k_dense_replace",
    "expert_weights_scale": "routed_scaling_factor", "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
}  # fmt: skip
"""`keys` of a model with experts as DeepSeek's."""


def windows(period: int) -> Config:
    """A `config`: every `period`-th layer sees all tokens and the others have a window, unless the file has a
    pattern."""

    def config(facts: GgufFacts) -> Mapping[str, Any]:
        window = facts.get("attention.sliding_window")
        if not window:
            return {"sliding_window": None, "layer_types": [FULL] * facts.common["num_hidden_layers"]}
        return {"sliding_window": int(window), "layer_types": layer_types(facts, period)}

    return config


def layer_types(facts: GgufFacts, period: int) -> list[str]:
    """A type for each layer, by the file's pattern (a list, or a period), else by `period`. Raises ValueError."""
    count, pattern = facts.common["num_hidden_layers"], facts.get("attention.sliding_window_pattern", period)
    if isinstance(pattern, int):
        pattern = [(i + 1) % max(pattern, 1) != 0 for i in range(count)]
    if len(pattern) != count:
        raise ValueError(f"attention.sliding_window_pattern has {len(pattern)} layers of {count}")
    return [SLIDING if local else FULL for local in pattern]


WINDOWS = frozenset({"attention.sliding_window", "attention.sliding_window_pattern"})
"""What `windows` reads."""
