"""Qwen3.5's text part: layers of the gated delta rule, each fourth one of gated attention; norms add 1 to weights."""

from __future__ import annotations

from llmc.compiler.architectures.shared.base import Family
from llmc.compiler.architectures.shared.delta import (
    DELTA_RULES,
    READS,
    TINY_DELTA,
    DeltaSize,
    delta_cache,
    delta_layer,
)
from llmc.compiler.architectures.shared.tiny import TINY

FAMILY = Family(
    model_class="Qwen3_5ForCausalLM",
    layer_at=delta_layer,
    reads=READS | {"attention_bias"},
    sharding=DELTA_RULES,
    size=DeltaSize.of,
    cache=delta_cache,
    tiny={**TINY, **TINY_DELTA},
)
