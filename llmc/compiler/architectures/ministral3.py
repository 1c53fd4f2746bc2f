"""Ministral 3: Mistral's layers, whose queries grow with the logarithm of how often their position passed a length."""

from __future__ import annotations

from llmc.compiler.architectures.shared.base import Family
from llmc.compiler.architectures.shared.tiny import TINY, WINDOW

FAMILY = Family(
    model_class="Ministral3ForCausalLM",
    reads=frozenset({"sliding_window", "llama_4_scaling_beta"}),
    tiny={
        **TINY, "num_hidden_layers": 2, "sliding_window": WINDOW, "pad_token_id": 0, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 16,
            "beta_fast": 8.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5,
        },
    },
)  # fmt: skip
