"""The model types that can be compiled to embed or score: ENCODERS, model types → `EncoderArchitecture`. Model types
are as in config.json, with "_" for "-"."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llmc.compiler.architectures.shared.cache import Config
from llmc.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class EncoderArchitecture:
    """A model type that embeds or scores. Source: transformers' configuration and modeling files."""

    padding_position: Callable[[Config], int | None] = lambda config: None
    """The padding token's id if it has a row in the position table, else None. Other tokens then count from the next
    row, and a padding token inside a text has that row. None: positions from 0."""
    token_types: Callable[[Config], bool] = lambda config: int(config.get("type_vocab_size") or 0) > 1
    """Whether the model distinguishes the segments of a pair (`token_type_ids`)."""
    attention: str = "sdpa"
    """transformers' attention implementation to trace; "eager" if the model has no other."""
    causal: bool = False
    """Whether tokens see only earlier ones, as in decoders; the last token then represents the text."""
    tiny: Mapping[str, Any]
    """The smallest configuration with all features of this architecture, for tests, without vocab_size."""

    def longest(self, config: Config) -> int:
        """Most tokens of a text that the positions cover."""
        padding = self.padding_position(config)
        return int(config["max_position_embeddings"]) - (0 if padding is None else padding + 1)


_TINY: Mapping[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "type_vocab_size": 2, "hidden_act": "gelu",
}  # fmt: skip

_POSITIONS_BEHIND_PADDING = EncoderArchitecture(
    padding_position=lambda config: int(config.get("pad_token_id", 1)),
    tiny={**_TINY, "type_vocab_size": 1, "pad_token_id": 1},
)
"""RoBERTa: positions count from the padding token's id + 1, over tokens that are not padding. Source: transformers
5.23, modeling_roberta.py (`create_position_ids_from_input_ids`)."""

ENCODERS: Mapping[str, EncoderArchitecture] = {
    # bge, e5 and gte (base sizes) and most of sentence-transformers' models
    "bert": EncoderArchitecture(tiny=_TINY),
    # BERT without segments, with other config keys
    "distilbert": EncoderArchitecture(
        token_types=lambda config: False,
        tiny={"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64},
    ),
    # rotary positions, gates, and windows in most layers
    "modernbert": EncoderArchitecture(
        token_types=lambda config: False,
        tiny={
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "max_position_embeddings": 64, "local_attention": 8, "global_attn_every_n_layers": 2, "pad_token_id": 0,
            "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
        },
    ),
    # BERT without segments, with a relative attention bias; positions as in RoBERTa
    "mpnet": EncoderArchitecture(
        padding_position=lambda config: 1,
        attention="eager",
        token_types=lambda config: False,
        tiny={**{k: v for k, v in _TINY.items() if k != "type_vocab_size"}, "pad_token_id": 1},
    ),
    # BERT with rotary positions and gates
    "nomic_bert": EncoderArchitecture(tiny={**_TINY, "hidden_act": "silu", "pad_token_id": 0}),
    # Qwen3-Embedding pools the last token, Qwen3-Reranker compares its "yes" and "no" logits
    "qwen3": EncoderArchitecture(
        token_types=lambda config: False,
        causal=True,
        tiny={
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "tie_word_embeddings": True,
        },
    ),
    "roberta": _POSITIONS_BEHIND_PADDING,
    # RoBERTa with another vocabulary; bge-m3, multilingual-e5 and bge-reranker
    "xlm_roberta": _POSITIONS_BEHIND_PADDING,
}  # fmt: skip


def encoder_architecture(config: Mapping[str, Any]) -> EncoderArchitecture:
    """The encoder architecture of a configuration. Raises CheckpointError for an unsupported model type."""
    name = str(config.get("model_type")).replace("-", "_")
    if name not in ENCODERS:
        raise CheckpointError(
            f"architecture {config.get('model_type')!r} is not supported for embedding or scoring; supported: "
            f"{', '.join(sorted(ENCODERS))}. config.json's model_type names the architecture"
        )
    return ENCODERS[name]
