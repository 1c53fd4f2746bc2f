"""Cohere's Command R: attention and MLP read one norm side by side; norms subtract the mean, neighbours are rotated."""

from __future__ import annotations

from llmc.compiler.architectures.shared.base import Config, Family
from llmc.compiler.architectures.shared.names import layer
from llmc.compiler.architectures.shared.size import tied_size
from llmc.compiler.architectures.shared.tiny import TINY

_DIFFERENT = ("head_dim", "rms_norm_eps")


def _layer(config: Config) -> list[str]:
    found = layer("qkvo" if config.get("attention_bias") else "", qk_norms=bool(config.get("use_qk_norm")))
    return [part for part in found if part != "post_attention_layernorm.weight"]


FAMILY = Family(
    model_class="CohereForCausalLM",
    layer=_layer,
    unread=frozenset({"rms_norm_eps"}),
    reads=frozenset({"attention_bias", "layer_norm_eps", "logit_scale", "use_qk_norm"}),
    harmless=frozenset({"model_max_length"}),
    size=tied_size,
    tiny={
        **{name: value for name, value in TINY.items() if name not in _DIFFERENT}, "num_hidden_layers": 2,
        "tie_word_embeddings": True, "layer_norm_eps": 1e-5, "logit_scale": 0.5, "use_qk_norm": True,
    },
)  # fmt: skip
