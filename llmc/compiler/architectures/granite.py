"""Granite without recurrent layers."""

from __future__ import annotations

from llmc.compiler.architectures.shared.base import TINY, Architecture
from llmc.compiler.architectures.shared.experts import EXPERT_RULES, Experts, ExpertsSize, expert_layer
from llmc.compiler.architectures.shared.gguf_form import Gguf, attention_bias, biases, expert_keys
from llmc.compiler.architectures.shared.names import biased_layer

ARCHITECTURES: dict[str, Architecture] = {}

SCALES = {
    "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip
"""Metadata of GGUF files."""


ARCHITECTURES["granite"] = Architecture(
    summary="Granite 3: Llama's layers with configurable multipliers of embeddings, scores, residuals and logits.",
    model_class="GraniteForCausalLM",
    layer=biased_layer,
    reads=frozenset({
        "attention_bias", "mlp_bias", "embedding_multiplier", "logits_scaling", "residual_multiplier",
        "attention_multiplier",
    }),
    gguf=Gguf("granite", keys=SCALES, config=biases, interleaved=True),
    tiny={
        **TINY, "num_hidden_layers": 2, "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
    },
)  # fmt: skip


ARCHITECTURES["granitemoe"] = Architecture(
    summary=(
        "Granite with experts: multipliers of embedding, attention, residuals and logits; routing weights are "
        "normalised after the choice."
    ),
    model_class="GraniteMoeForCausalLM",
    layer=lambda config: expert_layer(biased_layer(config), ("router.weight",), "block_sparse_moe"),
    reads=frozenset({
        "num_local_experts", "num_experts_per_tok", "embedding_multiplier", "attention_multiplier",
        "residual_multiplier", "logits_scaling", "attention_bias",
    }),
    harmless=frozenset({"router_aux_loss_coef", "output_router_logits"}),
    experts=Experts(("num_local_experts",), "linear"),
    sharding=EXPERT_RULES,
    size=ExpertsSize.reading(("num_local_experts",), "num_experts_per_tok"),
    fused={"linear": 3, "rms_norm": 0},
    gguf=Gguf("granitemoe", keys=SCALES | expert_keys("num_local_experts"), config=attention_bias, interleaved=True),
    tiny={
        **TINY, "num_hidden_layers": 2, "num_local_experts": 8, "num_experts_per_tok": 2, "embedding_multiplier": 12.0,
        "attention_multiplier": 0.2, "residual_multiplier": 0.3, "logits_scaling": 6.0,
    },
)  # fmt: skip
