"""What the families that follow GPT-2's code have in common: names, keys of config.json, and sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmc.compiler.architectures.shared.names import Names, with_biases
from llmc.compiler.architectures.shared.size import ModelSize

EMBEDDING = "transformer.wte.weight"
NAMES = Names(
    "transformer.h", EMBEDDING, others=lambda config: ["transformer.wpe.weight", *with_biases("transformer.ln_f")]
)
PARTS = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
"""Modules of a layer."""
KEYS = {
    "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}  # fmt: skip
NO_ROPE = frozenset({"rope_parameters", "rope_theta"})
UNREAD = frozenset({"num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "intermediate_size"}) | NO_ROPE
SUMMARY = frozenset({
    "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
})  # fmt: skip
"""Keys for classification heads."""


def derived(config: Mapping[str, Any], tied: bool = True) -> dict[str, Any]:
    """The MLP is four times as wide unless `n_inner` says otherwise; `tied`: the head is, where no key says so."""
    return {
        "intermediate_size": config.get("n_inner") or 4 * config["hidden_size"],
        "tie_word_embeddings": config.get("tie_word_embeddings", tied),
    }


def size(config: Mapping[str, Any], source: str) -> ModelSize:
    """An MLP without a gate, and a table of learned positions. Raises CheckpointError."""
    positions = int(config.get("max_position_embeddings") or 0)
    return replace(ModelSize.ungated(config, source), positions=positions)
