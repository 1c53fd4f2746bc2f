"""RoBERTa: BERT whose positions are counted behind the padding's id, by tokens that are not padding.

Source: transformers 5.23, modeling_roberta.py (`create_position_ids_from_input_ids`).
"""

from llmc.compiler.architectures.encoders.base import TINY, EncoderFamily

ENCODER = EncoderFamily(
    padding_position=lambda config: int(config.get("pad_token_id", 1)),
    tiny={**TINY, "type_vocab_size": 1, "pad_token_id": 1},
)
