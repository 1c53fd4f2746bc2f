"""GGUF's types whose blocks are kept, by name."""

from __future__ import annotations

from llmc.compiler.checkpoint.gguf_types import blocks, superblocks

BLOCK_TYPES = {**blocks.TYPES, **superblocks.TYPES}
