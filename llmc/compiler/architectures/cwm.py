"""CWM: Llama 3's layers, of which only every fourth sees more than a window."""

from __future__ import annotations

from llmc.compiler.architectures.shared.base import Family
from llmc.compiler.architectures.shared.cache import cache_in_turn
from llmc.compiler.architectures.shared.tiny import TINY, WINDOW

FAMILY = Family(
    model_class="CwmForCausalLM",
    reads=frozenset({"sliding_window", "layer_types"}),
    cache=cache_in_turn(4, 8192, first=True),
    tiny={
        **TINY, "num_hidden_layers": 2, "sliding_window": WINDOW,
        "layer_types": ["full_attention", "sliding_attention"],
    },
)  # fmt: skip
