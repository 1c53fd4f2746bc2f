"""GPT-J: attention and MLP read one norm side by side, a part of each head is rotated, neighbours with each other."""

from __future__ import annotations

from llmc.compiler.architectures.shared import gpt
from llmc.compiler.architectures.shared.base import Config, Family
from llmc.compiler.architectures.shared.names import Names, with_biases
from llmc.compiler.architectures.shared.sharding import rules
from llmc.compiler.architectures.shared.size import ModelSize

NAMES = Names("transformer.h", gpt.EMBEDDING, others=lambda config: [*with_biases("transformer.ln_f"), "lm_head.bias"])


def _layer(config: Config) -> list[str]:
    projections = [f"attn.{name}_proj.weight" for name in ("q", "k", "v", "out")]
    return [*with_biases("ln_1", "mlp.fc_in", "mlp.fc_out"), *projections]


FAMILY = Family(
    model_class="GPTJForCausalLM",
    layer=_layer,
    names=NAMES,
    computed=(".attn.bias", ".attn.masked_bias"),
    keys=gpt.KEYS,
    derived=lambda config: gpt.derived(config, tied=False),
    unread=gpt.UNREAD,
    reads=frozenset({"n_inner", "activation_function", "layer_norm_epsilon", "rotary_dim"}),
    allows={"scale_attn_weights": (True,)},
    harmless=gpt.SUMMARY | {"n_ctx", "rotary"},
    sharding=rules(
        NAMES, query=r"attn\.q_proj", keys=r"attn\.[kv]_proj", output=r"attn\.out_proj", up=r"mlp\.fc_in",
        down=r"mlp\.fc_out",
    ),
    size=ModelSize.ungated,
    tiny={
        "n_embd": 64, "n_inner": 96, "n_layer": 2, "n_head": 4, "n_positions": 128, "layer_norm_epsilon": 1e-5,
        "rotary_dim": 8,
    },
)  # fmt: skip
