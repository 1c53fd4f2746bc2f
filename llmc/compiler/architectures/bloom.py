"""BLOOM: ALiBi in place of positions, LayerNorm, also after the embedding, queries, keys and values in one tensor."""

from __future__ import annotations

from typing import Any

from llmc.compiler.architectures.shared.base import Config, Family
from llmc.compiler.architectures.shared.gpt import NO_ROPE
from llmc.compiler.architectures.shared.names import Names, with_biases
from llmc.compiler.architectures.shared.sharding import rules
from llmc.compiler.architectures.shared.size import ModelSize

NAMES = Names(
    "transformer.h", "transformer.word_embeddings.weight",
    others=lambda config: with_biases("transformer.word_embeddings_layernorm", "transformer.ln_f"),
)  # fmt: skip
PARTS = (
    "input_layernorm", "self_attention.query_key_value", "self_attention.dense", "post_attention_layernorm",
    "mlp.dense_h_to_4h", "mlp.dense_4h_to_h",
)  # fmt: skip


def _derived(config: Config) -> dict[str, Any]:
    hidden = config.get("n_embed") or config["hidden_size"]
    return {
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "tie_word_embeddings": config.get("tie_word_embeddings", True),
    }


FAMILY = Family(
    model_class="BloomForCausalLM",
    layer=lambda config: with_biases(*PARTS),
    names=NAMES,
    keys={"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
    derived=_derived,
    unread=NO_ROPE | {
        "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "intermediate_size",
        "max_position_embeddings",
    },
    reads=frozenset({"layer_norm_epsilon", "apply_residual_connection_post_layernorm", "n_embed"}),
    harmless=frozenset({
        "pretraining_tp", "slow_but_exact", "seq_length", "skip_bias_add", "skip_bias_add_qkv", "offset_alibi",
        "masked_softmax_fusion", "bias_dropout_fusion", "attention_softmax_in_fp32", "unk_token_id",
    }),
    sharding=rules(
        NAMES, query=r"self_attention\.query_key_value", output=r"self_attention\.dense", up=r"mlp\.dense_h_to_4h",
        down=r"mlp\.dense_4h_to_h",
    ),
    size=ModelSize.ungated,
    tiny={"hidden_size": 64, "n_layer": 2, "n_head": 4, "layer_norm_epsilon": 1e-5},
)  # fmt: skip
