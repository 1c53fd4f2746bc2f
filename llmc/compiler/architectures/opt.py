"""OPT: learned positions from row 2 on, LayerNorm, ReLU, and embeddings that may be narrower than the layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmc.compiler.architectures.shared.base import Config, Family
from llmc.compiler.architectures.shared.gpt import NO_ROPE
from llmc.compiler.architectures.shared.names import Names, with_biases
from llmc.compiler.architectures.shared.sharding import rules
from llmc.compiler.architectures.shared.size import ModelSize

OFFSET = 2
"""Rows of the table of positions that stand for none."""
PARTS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj", "self_attn_layer_norm", "fc1",
    "fc2", "final_layer_norm",
)  # fmt: skip


def _layer(config: Config) -> list[str]:
    biased = config.get("enable_bias", True)
    affine = config.get("layer_norm_elementwise_affine", True)
    linear = [name for name in PARTS if "norm" not in name]
    norms = with_biases(*(name for name in PARTS if "norm" in name)) if affine else []
    return norms + (with_biases(*linear) if biased else [f"{name}.weight" for name in linear])


def _others(config: Config) -> list[str]:
    found = ["embed_positions.weight"]
    if config.get("word_embed_proj_dim", config["hidden_size"]) != config["hidden_size"]:
        found += ["project_in.weight", "project_out.weight"]
    if config.get("do_layer_norm_before", True) and not config.get("_remove_final_layer_norm"):
        found += with_biases("final_layer_norm") if config.get("layer_norm_elementwise_affine", True) else []
    return [f"model.decoder.{name}" for name in found]


NAMES = Names("model.decoder.layers", "model.decoder.embed_tokens.weight", others=_others)


def _derived(config: Config) -> dict[str, Any]:
    return {"tie_word_embeddings": config.get("tie_word_embeddings", True)}


def _size(config: Config, source: str) -> ModelSize:
    positions = int(config.get("max_position_embeddings") or 0) + OFFSET
    return replace(ModelSize.ungated(config, source), positions=positions)


FAMILY = Family(
    model_class="OPTForCausalLM",
    layer=_layer,
    names=NAMES,
    keys={"intermediate_size": "ffn_dim"},
    derived=_derived,
    unread=NO_ROPE | {"intermediate_size", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps"},
    reads=frozenset({
        "ffn_dim", "activation_function", "do_layer_norm_before", "word_embed_proj_dim", "enable_bias",
        "layer_norm_elementwise_affine", "_remove_final_layer_norm",
    }),
    harmless=frozenset({"dropout", "layerdrop", "init_std", "activation_dropout"}),
    sharding=rules(
        NAMES, query=r"self_attn\.q_proj", keys=r"self_attn\.[kv]_proj", output=r"self_attn\.out_proj", up="fc1",
        down="fc2",
    ),
    size=_size,
    tiny={
        "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 128, "do_layer_norm_before": True,
    },
)  # fmt: skip
