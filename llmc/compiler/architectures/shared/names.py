"""transformers' names of tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

EMBEDDING, NORM, LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"

LM_HEADS: Mapping[str, tuple[str, ...]] = {
    LM_HEAD: (
        EMBEDDING, "transformer.wte.weight", "transformer.word_embeddings.weight", "model.decoder.embed_tokens.weight",
        "gpt_neox.embed_in.weight", "backbone.embeddings.weight", "model.embeddings.weight",
    ),
}  # fmt: skip
"""lm_head → embeddings to which it may be tied; a tied lm_head is not stored."""
EMBED_LM_HEAD = frozenset({*LM_HEADS, *(embedding for embeddings in LM_HEADS.values() for embedding in embeddings)})
"""All embeddings and lm_heads."""


@dataclass(frozen=True)
class Names:
    """transformers' names of a model's tensors; those of layer N are `LAYERS.N.…`."""

    layers: str = "model.layers"
    """The list of decoder layers."""
    embedding: str = EMBEDDING
    lm_head: str = LM_HEAD
    others: Callable[[Mapping[str, Any]], Sequence[str]] = lambda config: [NORM]
    """Further tensors outside layers, by configuration: norms, learned positions, lm_head's bias."""

    stored: Mapping[str, str] = field(default_factory=dict)
    """Names in published checkpoints → transformers', if they differ: {"embed_out.weight": "lm_head.weight"}."""
    stored_base: str = ""
    """Prefix in published checkpoints that stands for `base`: "backbone."."""

    @property
    def base(self) -> str:
        """Prefix of the model without lm_head, with a dot; absent in checkpoints that were saved without lm_head."""
        return self.layers.split(".")[0] + "."

    def in_full(self, stored: Collection[str]) -> dict[str, str]:
        """Names of a causal language model's tensors → names in the checkpoint.

        They lack `base` if it was saved without lm_head, like the first GPT-2 and BLOOM. transformers reads such
        checkpoints likewise (modeling_utils.py, base_model_prefix).
        """
        inner = self.layers.removeprefix(self.base) + "."
        short = any(name.startswith(inner) for name in stored) and not any(n.startswith(self.base) for n in stored)

        def full(name: str) -> str:
            name = self.stored.get(name, name)
            if self.stored_base and name.startswith(self.stored_base):
                return self.base + name.removeprefix(self.stored_base)
            return self.base + name if short and name not in LM_HEADS else name

        return {full(name): name for name in stored}


def with_biases(*parts: str) -> list[str]:
    """Weight and bias of each part of a layer."""
    return [f"{part}.{end}" for part in parts for end in ("weight", "bias")]


def layer(biases: str = "", *, mlp_biases: bool = False, qk_norms: bool = False, packed_mlp: bool = False) -> list[str]:
    """Tensors of one layer, without `model.layers.N.`. `biases`: the projections among q, k, v and o that have one
    ("qkv"). `mlp_biases`: all of the MLP's have one. `qk_norms`: queries and keys are normalised before the rotation.
    `packed_mlp`: gate and up are one tensor."""
    parts = ["input_layernorm.weight", "post_attention_layernorm.weight"]
    parts += [f"self_attn.{name}_proj.weight" for name in "qkvo"]
    parts += [f"self_attn.{name}_proj.bias" for name in biases]
    parts += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"] if qk_norms else []
    mlp = ("gate_up", "down") if packed_mlp else ("gate", "up", "down")
    ends = ("weight", "bias") if mlp_biases else ("weight",)
    return parts + [f"mlp.{name}_proj.{end}" for name in mlp for end in ends]


def biased_layer(
    config: Mapping[str, Any], which: str = "qkvo", *, default: bool = False, qk_norms: bool = False,
    packed_mlp: bool = False,
) -> list[str]:  # fmt: skip
    """Tensors of a layer in which `attention_bias` (or its `default`) adds biases to the projections `which`, and
    `mlp_bias` to the MLP."""
    biases = which if config.get("attention_bias", default) else ""
    return layer(biases, mlp_biases=bool(config.get("mlp_bias")), qk_norms=qk_norms, packed_mlp=packed_mlp)


def ungated(parts: Sequence[str]) -> list[str]:
    """Tensors of a layer without the MLP's gate."""
    return [part for part in parts if not part.startswith("mlp.gate_proj.")]
