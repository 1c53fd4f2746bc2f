"""ModernBERT: rotary positions, gates, and windows in most layers."""

from llmc.compiler.architectures.encoders.base import EncoderFamily

ENCODER = EncoderFamily(
    token_types=lambda config: False,
    tiny={
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 64, "local_attention": 8, "global_attn_every_n_layers": 2, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
    },
)  # fmt: skip
