"""XLM-RoBERTa: RoBERTa with another vocabulary; bge-m3, multilingual-e5 and bge-reranker have it."""

from llmc.compiler.architectures.encoders.roberta import ENCODER as ROBERTA

ENCODER = ROBERTA
