"""MPNet: BERT without segments, whose attention adds a bias by distance; positions as RoBERTa's."""

from llmc.compiler.architectures.encoders.base import TINY, EncoderFamily

ENCODER = EncoderFamily(
    padding_position=lambda config: 1,
    attention="eager",
    token_types=lambda config: False,
    tiny={**{k: v for k, v in TINY.items() if k != "type_vocab_size"}, "pad_token_id": 1},
)
