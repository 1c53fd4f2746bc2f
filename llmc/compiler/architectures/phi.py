"""Phi 1, 1.5 and 2: attention and MLP read the same hidden states, heads are rotated in part, the head has a bias."""

from __future__ import annotations

from llmc.compiler.architectures.shared.base import Config, Family
from llmc.compiler.architectures.shared.names import Names, with_biases
from llmc.compiler.architectures.shared.sharding import rules
from llmc.compiler.architectures.shared.size import ModelSize
from llmc.compiler.architectures.shared.tiny import TINY

NAMES = Names(others=lambda config: [*with_biases("model.final_layernorm"), "lm_head.bias"])


def _layer(config: Config) -> list[str]:
    parts = [*(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "dense")), "mlp.fc1", "mlp.fc2"]
    norms = ["self_attn.q_layernorm", "self_attn.k_layernorm"] if config.get("qk_layernorm") else []
    return with_biases("input_layernorm", *parts, *norms)


FAMILY = Family(
    model_class="PhiForCausalLM",
    layer=_layer,
    names=NAMES,
    unread=frozenset({"head_dim", "rms_norm_eps"}),
    reads=frozenset({"layer_norm_eps", "qk_layernorm", "partial_rotary_factor"}),
    sharding=rules(
        NAMES, query=r"self_attn\.q_proj", keys=r"self_attn\.[kv]_proj", output=r"self_attn\.dense", up=r"mlp\.fc1",
        down=r"mlp\.fc2",
    ),
    size=ModelSize.ungated,
    tiny={
        **{name: value for name, value in TINY.items() if name not in ("head_dim", "rms_norm_eps")},
        "num_hidden_layers": 2, "hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5,
    },
)  # fmt: skip
