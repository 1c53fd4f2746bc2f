"""DistilBERT: BERT without segments, by keys of its own names."""

from llmc.compiler.architectures.encoders.base import EncoderFamily

ENCODER = EncoderFamily(
    token_types=lambda config: False,
    tiny={"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64},
)
