"""Keys of published config.json files: all are read or change nothing; what would change the model is refused.

Keys and values as the checkpoints named have them on the hub, sizes aside.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.frontend.consumed import require_consumed
from llmc.compiler.frontend.skeleton import build_skeleton
from llmc.errors import CheckpointError
from tests.compiler.frontend.test_consumed import COMMON

_FACTORS = [1.0] * 6
"""Half of the 12 channels of a head of 16 that a partial rotary factor of 0.75 turns."""

PUBLISHED: dict[str, dict[str, Any]] = {
    "google/gemma-2-9b": {
        "model_type": "gemma2", "attention_bias": False, "attn_logit_softcapping": 50.0, "head_dim": 16,
        "cache_implementation": "hybrid", "final_logit_softcapping": 30.0, "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "rope_theta": 10000.0,
        "sliding_window": 4096, "sliding_window_size": 4096, "pad_token_id": 0,
    },
    "microsoft/Phi-4-mini-instruct": {
        "model_type": "phi3", "attention_bias": False, "embd_pdrop": 0.0, "full_attn_mod": 1, "interpolate_factor": 1,
        "lm_head_bias": False, "mlp_bias": False, "original_max_position_embeddings": 1024, "pad_token_id": 9,
        "partial_rotary_factor": 0.75, "resid_pdrop": 0.0, "rope_theta": 10000.0, "sliding_window": 262144,
        "rope_scaling": {"type": "longrope", "long_factor": _FACTORS, "short_factor": _FACTORS},
    },
    "HuggingFaceTB/SmolLM3-3B-Base": {
        "model_type": "smollm3", "attention_bias": False, "no_rope_layer_interval": 4, "pretraining_tp": 2,
        "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None, "use_sliding_window": False,
        "pad_token_id": 9,
    },
    "openai/gpt-oss-20b": {
        "model_type": "gpt_oss", "attention_bias": True, "experts_per_token": 2, "head_dim": 64, "hidden_act": "silu",
        "initial_context_length": 4096, "layer_types": ["sliding_attention", "full_attention"],
        "num_experts_per_tok": 2, "num_local_experts": 4, "output_router_logits": False, "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        }, "sliding_window": 128, "swiglu_limit": 7.0,
    },
    "deepseek-ai/DeepSeek-V2-Lite": {
        "model_type": "deepseek_v2", "attention_bias": False, "aux_loss_alpha": 0.001, "ep_size": 1,
        "first_k_dense_replace": 1, "kv_lora_rank": 24, "moe_intermediate_size": 48, "moe_layer_freq": 1, "n_group": 1,
        "n_routed_experts": 4, "n_shared_experts": 2, "norm_topk_prob": False, "num_experts_per_tok": 2,
        "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "rope_theta": 10000,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096, "type": "yarn",
        }, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": True, "topk_group": 1,
        "topk_method": "greedy", "v_head_dim": 16,
    },
    "deepseek-ai/DeepSeek-V3 in bfloat16": {
        "model_type": "deepseek_v3", "attention_bias": False, "ep_size": 1, "first_k_dense_replace": 1,
        "kv_lora_rank": 24, "moe_intermediate_size": 48, "moe_layer_freq": 1, "n_group": 2, "n_routed_experts": 8,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 2, "num_nextn_predict_layers": 1,
        "q_lora_rank": 40, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "rope_theta": 10000,
        "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_group": 1, "topk_method": "noaux_tc",
        "v_head_dim": 16,
    },
    "zai-org/GLM-4.5-Air": {
        "model_type": "glm4_moe", "attention_bias": True, "first_k_dense_replace": 1, "head_dim": 16,
        "moe_intermediate_size": 48, "n_group": 1, "n_routed_experts": 4, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_experts_per_tok": 2, "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5, "rope_scaling": None,
        "rope_theta": 1000000, "routed_scaling_factor": 1.0, "topk_group": 1, "use_qk_norm": False, "pad_token_id": 9,
    },
    "baidu/ERNIE-4.5-21B-A3B-PT": {
        "model_type": "ernie4_5_moe", "moe_capacity": [64, 64, 64], "moe_gate": "topk", "moe_intermediate_size": 48,
        "moe_k": 2, "moe_layer_end_index": 1, "moe_layer_interval": 1, "moe_layer_start_index": 1, "moe_num_experts": 4,
        "moe_num_shared_experts": 2, "moe_use_aux_free": True, "num_nextn_predict_layers": 1, "rope_theta": 500000,
        "use_bias": False, "pad_token_id": 0,
    },
    "CohereLabs/tiny-aya-earth": {
        "model_type": "cohere2", "attention_bias": False, "cache_implementation": "hybrid", "head_dim": 16,
        "layer_norm_eps": 1e-05, "layer_switch": 4, "logit_scale": 1.0,
        "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj", "rope_theta": 50000, "rotary_pct": 1.0, "sliding_window": 4096,
        "use_embedding_sharing": True, "use_gated_activation": True, "use_parallel_block": True,
        "use_parallel_embedding": False, "use_qk_norm": False, "rms_norm_eps": None,
    },
}  # fmt: skip


def checkpoint(tmp_path: Path, config: dict[str, Any]) -> Any:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return open_checkpoint(path)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_is_read_in_full_and_makes_a_model(name: str, tmp_path: Path) -> None:
    found = checkpoint(tmp_path, {**COMMON, **PUBLISHED[name]})
    require_consumed(found)
    build_skeleton(found.config)


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("google/gemma-2-9b", {"hidden_act": "silu"}),
        ("google/gemma-2-9b", {"use_bidirectional_attention": True}),
        ("microsoft/Phi-4-mini-instruct", {"lm_head_bias": True}),
        ("microsoft/Phi-4-mini-instruct", {"full_attn_mod": 2}),
        ("CohereLabs/tiny-aya-earth", {"position_embedding_type": "rope_neox"}),
        ("CohereLabs/tiny-aya-earth", {"rotary_pct": 0.5}),
        ("CohereLabs/tiny-aya-earth", {"rms_norm_eps": 1e-6}),
        ("CohereLabs/tiny-aya-earth", {"use_parallel_block": False}),
    ],
    ids=str,
)
def test_a_value_that_requests_another_model_is_refused_by_name(
    name: str, changed: dict[str, Any], tmp_path: Path
) -> None:
    (key,) = changed
    with pytest.raises(CheckpointError, match=f"the configuration has {key}: .*, which nothing reads"):
        require_consumed(checkpoint(tmp_path, {**COMMON, **PUBLISHED[name], **changed}))
