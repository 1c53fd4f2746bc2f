"""Nomic BERT: BERT with rotary positions and gates."""

from llmc.compiler.architectures.encoders.base import TINY, EncoderFamily

ENCODER = EncoderFamily(tiny={**TINY, "hidden_act": "silu", "pad_token_id": 0})
