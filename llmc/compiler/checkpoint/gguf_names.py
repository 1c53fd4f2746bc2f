"""Names and row order: GGUF on one side, transformers on the other."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

Scalar = TypeVar("Scalar", bound=np.generic)

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def transformers_name(name: str) -> str | None:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`; None where there is none."""
    if name in _TOP:
        return _TOP[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER and parts[3] in ("weight", "bias"):
        return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.{parts[3]}"
    return None


def restore_row_order(rows: np.ndarray[Any, np.dtype[Scalar]], heads: int) -> np.ndarray[Any, np.dtype[Scalar]]:
    """Rows [N, …] of a q or k projection, from llama.cpp's order back to transformers'.

    llama.cpp rotates neighbours (2i, 2i+1) of a head, transformers rotates (i, i + head_dim/2), so conversion
    to GGUF interleaves the two halves of each head. Only architecture llama is stored so.
    """
    half = rows.shape[0] // heads // 2
    return np.ascontiguousarray(rows.reshape(heads, half, 2, *rows.shape[1:]).swapaxes(1, 2)).reshape(rows.shape)
