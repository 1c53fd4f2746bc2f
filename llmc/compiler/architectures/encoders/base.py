"""The contract of an encoder's file: ENCODER, one `EncoderFamily`. Defaults are BERT's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

Config: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class EncoderFamily:
    """A model type that embeds or scores. Source: transformers' configuration and modeling files of it."""

    padding_position: Callable[[Config], int | None] = lambda config: None
    """The id of padding where it has a row of the table of positions: other tokens are counted behind that row, and a
    token of that id inside a text has the row itself. None: positions from 0."""
    token_types: Callable[[Config], bool] = lambda config: int(config.get("type_vocab_size") or 0) > 1
    """Whether the model tells segments of a pair apart (`token_type_ids`)."""
    attention: str = "sdpa"
    """transformers' name of the attention that the model is traced with; "eager" where it knows no other."""
    causal: bool = False
    """Whether a token sees those before it alone, as in decoders: then the last one stands for the text."""
    tiny: Mapping[str, Any]
    """The smallest configuration that has all features of this family, for tests, without vocab_size."""

    def longest(self, config: Config) -> int:
        """Tokens of the longest text that its positions reach."""
        padding = self.padding_position(config)
        return int(config["max_position_embeddings"]) - (0 if padding is None else padding + 1)


TINY: Mapping[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "type_vocab_size": 2, "hidden_act": "gelu",
}  # fmt: skip
