"""Mixtral: Mistral's attention, and two of eight MLPs a token, whose weights sum to 1."""

from __future__ import annotations

from llmc.compiler.architectures.shared.base import Family
from llmc.compiler.architectures.shared.experts import EXPERT_RULES, Experts, ExpertsSize, expert_layer
from llmc.compiler.architectures.shared.names import layer
from llmc.compiler.architectures.shared.tiny import TINY, WINDOW

FAMILY = Family(
    model_class="MixtralForCausalLM",
    layer=lambda config: expert_layer(layer()),
    reads=frozenset({"sliding_window", "num_local_experts", "num_experts_per_tok"}),
    harmless=frozenset({"router_aux_loss_coef", "router_jitter_noise", "output_router_logits"}),
    experts=Experts(("num_local_experts",), "w123"),
    sharding=EXPERT_RULES,
    size=ExpertsSize.reading(("num_local_experts",), "num_experts_per_tok"),
    fused={"linear": 3, "rms_norm": 0},
    tiny={**TINY, "num_hidden_layers": 2, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": WINDOW},
)
