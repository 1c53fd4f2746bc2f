"""Ministral: Mistral's layers, whose windows differ by layer."""

from __future__ import annotations

from llmc.compiler.architectures.shared.base import Family
from llmc.compiler.architectures.shared.cache import attention_cache
from llmc.compiler.architectures.shared.tiny import TINY, WINDOW

FAMILY = Family(
    model_class="MinistralForCausalLM",
    reads=frozenset({"sliding_window", "layer_types"}),
    cache=lambda config: attention_cache({"sliding_window": 4096, **config}),
    tiny={
        **TINY, "num_hidden_layers": 2, "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
    },
)  # fmt: skip
