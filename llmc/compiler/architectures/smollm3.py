"""SmolLM3: Llama's layers, some of them without rotary positions, by layer or every so many."""

from __future__ import annotations

from llmc.compiler.architectures.shared.base import Config, Family
from llmc.compiler.architectures.shared.cache import SLIDING, attention_cache
from llmc.compiler.architectures.shared.names import layer
from llmc.compiler.architectures.shared.size import tied_size
from llmc.compiler.architectures.shared.tiny import TINY
from llmc.runtime.cache_shape import CacheShape


def _layer(config: Config) -> list[str]:
    return layer("qkvo" if config.get("attention_bias") else "", mlp_biases=bool(config.get("mlp_bias")))


def _cache(config: Config) -> CacheShape:
    """Layers without rotary positions have a window, where `use_sliding_window` asks for one."""
    every, layers = config.get("no_rope_layer_interval", 4), range(config["num_hidden_layers"])
    rotated = config.get("no_rope_layers") or [(i + 1) % every for i in layers]
    types = [SLIDING if config.get("use_sliding_window") and not rotated[i] else "full_attention" for i in layers]
    return attention_cache({**config, "layer_types": config.get("layer_types") or types})


FAMILY = Family(
    model_class="SmolLM3ForCausalLM",
    layer=_layer,
    reads=frozenset({
        "attention_bias", "mlp_bias", "use_sliding_window", "sliding_window", "no_rope_layers",
        "no_rope_layer_interval", "layer_types",
    }),
    allows={"pretraining_tp": (1, 2)},
    harmless=frozenset({"max_window_layers"}),
    cache=_cache,
    size=tied_size,
    tiny={**TINY, "num_hidden_layers": 2, "no_rope_layers": [1, 0], "pad_token_id": 0},
)  # fmt: skip
