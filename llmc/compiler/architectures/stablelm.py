"""StableLM: Llama's layers with LayerNorm, a part of each head rotated, and optionally norms of each head."""

from __future__ import annotations

from llmc.compiler.architectures.shared.base import Config, Family
from llmc.compiler.architectures.shared.names import Names, layer, with_biases
from llmc.compiler.architectures.shared.sharding import rules
from llmc.compiler.architectures.shared.tiny import TINY

NAMES = Names(others=lambda config: with_biases("model.norm"))


def _layer(config: Config) -> list[str]:
    parts = [*layer("qkv" if config.get("use_qkv_bias") else ""), "input_layernorm.bias"]
    if config.get("use_parallel_residual"):
        parts.remove("post_attention_layernorm.weight")
    else:
        parts.append("post_attention_layernorm.bias")
    if config.get("qk_layernorm"):
        heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
        parts += [f"self_attn.{name}_layernorm.norms.{i}.weight" for name, count in heads.items() for i in range(count)]
    return parts


FAMILY = Family(
    model_class="StableLmForCausalLM",
    layer=_layer,
    names=NAMES,
    unread=frozenset({"head_dim", "rms_norm_eps"}),
    reads=frozenset({
        "layer_norm_eps", "use_qkv_bias", "qk_layernorm", "use_parallel_residual", "partial_rotary_factor",
    }),
    harmless=frozenset({"rope_pct", "rotary_scaling_factor"}),
    sharding=rules(
        NAMES, query=r"self_attn\.q_proj", keys=r"self_attn\.[kv]_proj", output=r"self_attn\.o_proj",
        up=r"mlp\.(?:gate|up)_proj", down=r"mlp\.down_proj",
    ),
    tiny={
        **{name: value for name, value in TINY.items() if name not in ("head_dim", "rms_norm_eps")},
        "num_hidden_layers": 2, "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "use_qkv_bias": True,
    },
)  # fmt: skip
