"""Qwen3: queries and keys are normed before they are rotated, so that their projections stay apart when fused."""

from __future__ import annotations

from llmc.compiler.architectures.shared.base import Family, Gguf
from llmc.compiler.architectures.shared.cache import late_window_cache
from llmc.compiler.architectures.shared.names import layer
from llmc.compiler.architectures.shared.tiny import TINY

FAMILY = Family(
    model_class="Qwen3ForCausalLM",
    layer=lambda config: layer("qkvo" if config.get("attention_bias") else "", qk_norms=True),
    reads=frozenset({"layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "attention_bias"}),
    cache=late_window_cache,
    gguf=Gguf("qwen3"),
    fused={"linear": 6, "rms_norm": 2},
    tiny=TINY,
)
