"""Mistral's models."""

from __future__ import annotations

from typing import Any

from llmc.compiler.architectures.shared.base import TINY, WINDOW, Architecture
from llmc.compiler.architectures.shared.cache import attention_cache
from llmc.compiler.architectures.shared.experts import EXPERT_RULES, Experts, ExpertsSize, expert_layer
from llmc.compiler.architectures.shared.gguf_form import Gguf, GgufFacts, expert_keys
from llmc.compiler.architectures.shared.names import layer

ARCHITECTURES: dict[str, Architecture] = {}

ARCHITECTURES["mistral"] = Architecture(
    summary="Mistral: Llama's layers without biases, and a sliding window. GGUF files declare it as a Llama.",
    model_class="MistralForCausalLM",
    reads=frozenset({"sliding_window"}),
    cache=lambda config: attention_cache({"sliding_window": 4096, **config}),
    tiny={**TINY, "num_hidden_layers": 2, "sliding_window": WINDOW},
)


ARCHITECTURES["ministral"] = Architecture(
    summary="Ministral: Mistral's layers with windows that differ by layer.",
    model_class="MinistralForCausalLM",
    reads=frozenset({"sliding_window", "layer_types"}),
    cache=lambda config: attention_cache({"sliding_window": 4096, **config}),
    tiny={
        **TINY, "num_hidden_layers": 2, "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
    },
)  # fmt: skip


def _gguf_config(facts: GgufFacts) -> dict[str, Any]:
    rope = dict(facts.common["rope_parameters"])
    if (beta := facts.get("attention.temperature_scale")) is not None:
        rope["llama_4_scaling_beta"] = float(beta)
    if (log := facts.get("rope.scaling.yarn_log_multiplier")) is not None:
        rope |= {"mscale": float(log), "mscale_all_dim": float(log)}
    return {"rope_parameters": rope, "sliding_window": None}


ARCHITECTURES["ministral3"] = Architecture(
    summary=(
        "Ministral 3: Mistral's layers; queries are scaled by the logarithm of how often their position exceeds a "
        "length."
    ),
    model_class="Ministral3ForCausalLM",
    reads=frozenset({"sliding_window", "llama_4_scaling_beta"}),
    rope={"yarn": frozenset({"max_position_embeddings"})},  # transformers writes it there, and ignores it
    gguf=Gguf(
        "mistral3", config=_gguf_config,
        reads=frozenset({"attention.temperature_scale", "rope.scaling.yarn_log_multiplier"}),
        interleaved=True,
    ),
    tiny={
        **TINY, "num_hidden_layers": 2, "sliding_window": WINDOW, "pad_token_id": 0, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 16,
            "beta_fast": 8.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5,
        },
    },
)  # fmt: skip


ARCHITECTURES["mixtral"] = Architecture(
    summary="Mixtral: Mistral's attention, and two of eight MLPs per token, with weights that sum to 1.",
    model_class="MixtralForCausalLM",
    layer=lambda config: expert_layer(layer()),
    reads=frozenset({"sliding_window", "num_local_experts", "num_experts_per_tok"}),
    harmless=frozenset({"router_aux_loss_coef", "router_jitter_noise", "output_router_logits"}),
    experts=Experts(("num_local_experts",), "w123"),
    sharding=EXPERT_RULES,
    size=ExpertsSize.reading(("num_local_experts",), "num_experts_per_tok"),
    fused={"linear": 3, "rms_norm": 0},
    gguf=Gguf(
        "llama",
        keys=expert_keys("num_local_experts"),
        config=lambda facts: {"sliding_window": None},
        interleaved=True,
        suits=lambda facts: bool(facts.get("expert_count")),
    ),
    tiny={**TINY, "num_hidden_layers": 2, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": WINDOW},
)
