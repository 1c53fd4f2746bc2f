"""Mamba: layers of the first form alone, which keep states and no keys and values."""

from __future__ import annotations

from llmc.compiler.architectures.shared import selective
from llmc.compiler.architectures.shared.base import Family
from llmc.compiler.architectures.shared.sharding import rules

FAMILY = Family(
    model_class="MambaForCausalLM",
    layer=selective.backbone_layer,
    names=selective.BACKBONE,
    derived=lambda config: {"tie_word_embeddings": config.get("tie_word_embeddings", True)},
    unread=selective.UNREAD,
    reads=selective.READS | {"time_step_rank"},
    allows=selective.ALLOWS,
    harmless=selective.HARMLESS | {"intermediate_size"},
    sharding=rules(selective.BACKBONE),
    size=selective.backbone_size,
    cache=selective.backbone_cache,
    fused={"linear": 3, "rms_norm": 0},
    tiny={"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8, "use_bias": True},
)
