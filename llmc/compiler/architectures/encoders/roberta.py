"""RoBERTa: BERT whose positions are counted behind the padding's id (transformers' modeling_roberta.py)."""

from llmc.compiler.architectures.encoders.base import TINY, EncoderFamily

ENCODER = EncoderFamily(
    first_position=lambda config: int(config.get("pad_token_id", 1)) + 1,
    tiny={**TINY, "type_vocab_size": 1, "pad_token_id": 1},
)
