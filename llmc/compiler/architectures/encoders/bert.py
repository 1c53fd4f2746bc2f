"""BERT: bge, e5 and gte (base sizes) and most of sentence-transformers' models have it."""

from llmc.compiler.architectures.encoders.base import TINY, EncoderFamily

ENCODER = EncoderFamily(tiny=TINY)
