"""VaultGemma: Gemma 2 without the norms after its blocks."""

from __future__ import annotations

from llmc.compiler.architectures.shared.base import Config, Family
from llmc.compiler.architectures.shared.cache import cache_in_turn
from llmc.compiler.architectures.shared.names import layer
from llmc.compiler.architectures.shared.size import tied_size
from llmc.compiler.architectures.shared.tiny import TINY, WINDOW


def _layer(config: Config) -> list[str]:
    found = layer("qkvo" if config.get("attention_bias") else "")
    return ["pre_feedforward_layernorm.weight", *(p for p in found if p != "post_attention_layernorm.weight")]


FAMILY = Family(
    model_class="VaultGemmaForCausalLM",
    layer=_layer,
    unread=frozenset({"hidden_act"}),
    reads=frozenset({
        "attention_bias", "hidden_activation", "query_pre_attn_scalar", "sliding_window", "layer_types",
        "final_logit_softcapping", "attn_logit_softcapping",
    }),
    cache=cache_in_turn(2),
    size=tied_size,
    tiny={
        **TINY, "num_hidden_layers": 2, "tie_word_embeddings": True, "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"], "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 24, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0,
    },
)  # fmt: skip
