"""Qwen2 and Qwen2.5: q, k and v have biases, which no key switches off."""

from __future__ import annotations

from llmc.compiler.architectures.shared.base import Family, Gguf
from llmc.compiler.architectures.shared.cache import late_window_cache
from llmc.compiler.architectures.shared.names import layer
from llmc.compiler.architectures.shared.tiny import TINY

FAMILY = Family(
    model_class="Qwen2ForCausalLM",
    layer=lambda config: layer("qkv"),
    reads=frozenset({"layer_types", "sliding_window", "use_sliding_window", "max_window_layers"}),
    allows={"attention_bias": (True,)},
    cache=late_window_cache,
    gguf=Gguf("qwen2"),
    tiny=TINY,
)
