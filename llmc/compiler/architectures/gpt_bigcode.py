"""GPT-BigCode (StarCoder, SantaCoder): GPT-2's layers with weights [out, in], and one head of keys and values."""

from __future__ import annotations

from typing import Any

from llmc.compiler.architectures.shared import gpt
from llmc.compiler.architectures.shared.base import Config, Family
from llmc.compiler.architectures.shared.names import with_biases
from llmc.compiler.architectures.shared.sharding import rules


def _derived(config: Config) -> dict[str, Any]:
    heads = 1 if config.get("multi_query", True) else config["num_attention_heads"]
    return {**gpt.derived(config), "num_key_value_heads": heads}


FAMILY = Family(
    model_class="GPTBigCodeForCausalLM",
    layer=lambda config: with_biases(*gpt.PARTS),
    names=gpt.NAMES,
    computed=(".attn.bias", ".attn.masked_bias"),
    keys=gpt.KEYS,
    derived=_derived,
    unread=gpt.UNREAD,
    reads=frozenset({
        "n_inner", "activation_function", "layer_norm_epsilon", "scale_attn_weights", "multi_query",
        "scale_attention_softmax_in_fp32",
    }),
    harmless=gpt.SUMMARY | {
        "n_ctx", "attention_softmax_in_fp32", "inference_runner", "pre_allocate_kv_cache", "validate_runner_input",
        "max_batch_size", "max_sequence_length", "pad_key_length",
    },
    sharding=rules(gpt.NAMES, up=r"mlp\.c_fc", down=r"mlp\.c_proj", output=r"attn\.c_proj"),
    size=gpt.size,
    tiny={
        "n_embd": 64, "n_inner": 96, "n_layer": 2, "n_head": 4, "n_positions": 128, "layer_norm_epsilon": 1e-5,
        "multi_query": True,
    },
)  # fmt: skip
