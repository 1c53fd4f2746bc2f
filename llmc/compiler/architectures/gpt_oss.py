"""gpt-oss."""

from __future__ import annotations

from typing import Any

from llmc.compiler.architectures.shared.base import TINY, WINDOW, Architecture
from llmc.compiler.architectures.shared.cache import cache_in_turn
from llmc.compiler.architectures.shared.experts import EXPERT_RULES, Experts, ExpertsSize, expert_layer
from llmc.compiler.architectures.shared.gguf_form import WINDOWS, Gguf, GgufFacts, attention_bias, expert_keys, windows
from llmc.compiler.architectures.shared.names import biased_layer
from llmc.compiler.architectures.shared.sharding import LAYER, Rule

ARCHITECTURES: dict[str, Architecture] = {}

_ROUTER = ("router.weight", "router.bias", "experts.gate_up_proj_bias", "experts.down_proj_bias")


def _gguf_config(facts: GgufFacts) -> dict[str, Any]:
    """openai/gpt-oss states `truncate`: false, which no metadata has."""
    return {
        **windows(2)(facts), **attention_bias(facts),
        "rope_parameters": {**facts.common["rope_parameters"], "truncate": False},
    }  # fmt: skip


ARCHITECTURES["gpt_oss"] = Architecture(
    summary="gpt-oss: attention with sinks, alternating windows, and clamped experts with interleaved gate and up.",
    model_class="GptOssForCausalLM",
    layer=lambda config: [
        *expert_layer(biased_layer(config, default=True), _ROUTER),
        "self_attn.sinks",
    ],
    reads=frozenset({
        "num_local_experts", "num_experts_per_tok", "swiglu_alpha", "swiglu_limit", "sliding_window", "layer_types",
        "attention_bias",
    }),
    # rope_parameters repeats the original context; experts_per_token is an older name of num_experts_per_tok
    harmless=frozenset({
        "router_aux_loss_coef", "output_router_logits", "initial_context_length", "experts_per_token",
    }),
    cache=cache_in_turn(2, 128),
    experts=Experts(("num_local_experts",)),
    sharding=(*EXPERT_RULES, Rule("attention sinks", LAYER + r"self_attn\.sinks", 0, "num_attention_heads")),
    size=ExpertsSize.reading(("num_local_experts",), "num_experts_per_tok", biased=True),
    fused={"linear": 3, "rms_norm": 0},
    gguf=Gguf(
        "gpt-oss", keys=expert_keys("num_local_experts"),
        config=_gguf_config, reads=WINDOWS, neutral={"expert_feed_forward_length": None}, turned_experts=True,
    ),
    tiny={
        **TINY, "num_hidden_layers": 2, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": WINDOW,
        "swiglu_limit": 0.5, "attention_bias": True,
    },
)  # fmt: skip
