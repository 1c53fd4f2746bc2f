"""Phi-3 and Phi-4: Llama's layers whose q, k and v, and gate and up, are one tensor each."""

from __future__ import annotations

from llmc.compiler.architectures.shared.base import Family
from llmc.compiler.architectures.shared.sharding import PACKED_RULES
from llmc.compiler.architectures.shared.tiny import TINY, WINDOW

_LAYER = [
    "input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.qkv_proj.weight", "self_attn.o_proj.weight",
    "mlp.gate_up_proj.weight", "mlp.down_proj.weight",
]  # fmt: skip

FAMILY = Family(
    model_class="Phi3ForCausalLM",
    layer=lambda config: list(_LAYER),
    reads=frozenset({"original_max_position_embeddings", "partial_rotary_factor", "sliding_window"}),
    allows={"full_attn_mod": (1,), "interpolate_factor": (1,), "lm_head_bias": (False,)},
    sharding=PACKED_RULES,
    tiny={
        **TINY, "num_hidden_layers": 2, "sliding_window": WINDOW, "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
)  # fmt: skip
