"""StarCoder 2: grouped heads, LayerNorm, biases everywhere by a key, an MLP without a gate, a sliding window."""

from __future__ import annotations

from typing import Any

from llmc.compiler.architectures.shared.base import Config, Family
from llmc.compiler.architectures.shared.names import Names, with_biases
from llmc.compiler.architectures.shared.sharding import rules
from llmc.compiler.architectures.shared.size import ModelSize
from llmc.compiler.architectures.shared.tiny import TINY, WINDOW

NAMES = Names(others=lambda config: with_biases("model.norm"))


def _layer(config: Config) -> list[str]:
    linear = [*(f"self_attn.{name}_proj" for name in "qkvo"), "mlp.c_fc", "mlp.c_proj"]
    norms = with_biases("input_layernorm", "post_attention_layernorm")
    return norms + (with_biases(*linear) if config.get("use_bias", True) else [f"{name}.weight" for name in linear])


def _derived(config: Config) -> dict[str, Any]:
    return {"tie_word_embeddings": config.get("tie_word_embeddings", True)}


FAMILY = Family(
    model_class="Starcoder2ForCausalLM",
    layer=_layer,
    names=NAMES,
    derived=_derived,
    unread=frozenset({"head_dim", "rms_norm_eps"}),
    reads=frozenset({"norm_epsilon", "use_bias", "sliding_window"}),
    allows={"mlp_type": ("default",), "norm_type": ("layer_norm",)},
    harmless=frozenset({"residual_dropout", "embedding_dropout"}),
    sharding=rules(
        NAMES, query=r"self_attn\.q_proj", keys=r"self_attn\.[kv]_proj", output=r"self_attn\.o_proj",
        up=r"mlp\.c_fc", down=r"mlp\.c_proj",
    ),
    size=ModelSize.ungated,
    tiny={
        **{name: value for name, value in TINY.items() if name not in ("head_dim", "rms_norm_eps")},
        "num_hidden_layers": 2, "norm_epsilon": 1e-5, "hidden_act": "gelu_pytorch_tanh", "sliding_window": WINDOW,
        "tie_word_embeddings": True,
    },
)  # fmt: skip
