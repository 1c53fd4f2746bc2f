"""Names of tensors: transformers', and those of GGUF files."""

from __future__ import annotations

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"

GGUF_TOP = {"token_embd.weight": EMBEDDING, "output_norm.weight": NORM, "output.weight": HEAD}
GGUF_LAYER = {
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
"""Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, "Standardized tensor names"."""


def layer(biases: str = "", *, mlp_biases: bool = False, qk_norms: bool = False) -> list[str]:
    """Tensors of one layer, without `model.layers.N.`.

    `biases`: which of the projections q, k, v and o have one ("qkv"); `mlp_biases`: all three of the MLP's; `qk_norms`:
    queries and keys are normed before they are rotated.
    """
    parts = ["input_layernorm.weight", "post_attention_layernorm.weight"]
    parts += [f"self_attn.{name}_proj.weight" for name in "qkvo"]
    parts += [f"self_attn.{name}_proj.bias" for name in biases]
    parts += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"] if qk_norms else []
    ends = ("weight", "bias") if mlp_biases else ("weight",)
    return parts + [f"mlp.{name}_proj.{end}" for name in ("gate", "up", "down") for end in ends]
