"""Qwen3 as an encoder: Qwen3-Embedding takes its last token's state, Qwen3-Reranker that token's "yes" against "no"."""

from llmc.compiler.architectures.encoders.base import EncoderFamily

ENCODER = EncoderFamily(
    token_types=lambda config: False,
    causal=True,
    tiny={
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "tie_word_embeddings": True,
    },
)  # fmt: skip
