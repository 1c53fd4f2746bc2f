"""Mistral: Llama's layers without biases, and attention within a sliding window. GGUF files say that it is a Llama."""

from __future__ import annotations

from llmc.compiler.architectures.shared.base import Family
from llmc.compiler.architectures.shared.cache import attention_cache
from llmc.compiler.architectures.shared.tiny import TINY, WINDOW

FAMILY = Family(
    model_class="MistralForCausalLM",
    reads=frozenset({"sliding_window"}),
    cache=lambda config: attention_cache({"sliding_window": 4096, **config}),
    tiny={**TINY, "num_hidden_layers": 2, "sliding_window": WINDOW},
)
