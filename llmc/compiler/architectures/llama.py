"""Llama, and models that differ from it in details."""

from __future__ import annotations

from llmc.compiler.architectures.shared.base import TINY, WINDOW, Architecture, tied_by_default, tiny_without
from llmc.compiler.architectures.shared.cache import SLIDING, Config, attention_cache, cache_in_turn
from llmc.compiler.architectures.shared.gguf_form import WINDOWS, Gguf, biases, windows
from llmc.compiler.architectures.shared.names import Names, biased_layer, layer, ungated, with_biases
from llmc.compiler.architectures.shared.sharding import PROJECTIONS, rules
from llmc.compiler.architectures.shared.size import ModelSize, tied_size
from llmc.runtime.cache_shape import CacheShape

ARCHITECTURES: dict[str, Architecture] = {}
_LAYER_NORM = Names(others=lambda config: with_biases("model.norm"))
"""For models whose last norm has a bias."""


ARCHITECTURES["llama"] = Architecture(
    summary="Llama, and whatever has its layers: biases are optional; GGUF files interleave the rows of q and k.",
    model_class="LlamaForCausalLM",
    layer=biased_layer,
    reads=frozenset({"attention_bias", "mlp_bias"}),
    gguf=Gguf("llama", config=biases, interleaved=True, suits=lambda facts: not facts.get("expert_count")),
    tiny={**TINY, "num_hidden_layers": 2},
)


ARCHITECTURES["arcee"] = Architecture(
    summary="Arcee's AFM: Llama's layers with squared ReLU in an MLP without a gate.",
    model_class="ArceeForCausalLM",
    layer=lambda config: ungated(biased_layer(config)),
    reads=frozenset({"attention_bias", "mlp_bias"}),
    size=ModelSize.ungated,
    gguf=Gguf("arcee", config=lambda facts: {**biases(facts), "hidden_act": "relu2"}, interleaved=True),
    tiny={**TINY, "num_hidden_layers": 2, "hidden_act": "relu2"},
)


ARCHITECTURES["cwm"] = Architecture(
    summary="CWM: Llama 3's layers; every fourth sees all tokens, the others have a window.",
    model_class="CwmForCausalLM",
    reads=frozenset({"sliding_window", "layer_types"}),
    cache=cache_in_turn(4, 8192, first=True),
    tiny={
        **TINY, "num_hidden_layers": 2, "sliding_window": WINDOW,
        "layer_types": ["full_attention", "sliding_attention"],
    },
)  # fmt: skip


def _exaone4_layer(config: Config) -> list[str]:
    parts = layer(qk_norms=True)
    return ["post_feedforward_layernorm.weight", *(part for part in parts if part != "input_layernorm.weight")]


ARCHITECTURES["exaone4"] = Architecture(
    summary="EXAONE 4: norms on block outputs instead of inputs; layers without a window have no rotary positions.",
    model_class="Exaone4ForCausalLM",
    layer=_exaone4_layer,
    reads=frozenset({"sliding_window", "sliding_window_pattern", "layer_types"}),
    cache=cache_in_turn(4),
    gguf=Gguf("exaone4", config=windows(4), reads=WINDOWS),
    tiny={
        **TINY, "num_hidden_layers": 2, "sliding_window": WINDOW, "pad_token_id": 0,
        "layer_types": ["sliding_attention", "full_attention"],
    },
)  # fmt: skip


ARCHITECTURES["helium"] = Architecture(
    summary="Helium: Llama's layers with RoPE that rotates neighbours.",
    model_class="HeliumForCausalLM",
    layer=lambda config: biased_layer(config, "qkv"),
    reads=frozenset({"attention_bias", "mlp_bias"}),
    tiny={**TINY, "num_hidden_layers": 2, "pad_token_id": 0},
)


def _hunyuan_layer(config: Config) -> list[str]:
    found = biased_layer(config)
    return [*found, "self_attn.query_layernorm.weight", "self_attn.key_layernorm.weight"]


ARCHITECTURES["hunyuan_v1_dense"] = Architecture(
    summary="Hunyuan's dense models: Llama's layers with norms on queries and keys after the rotation.",
    model_class="HunYuanDenseV1ForCausalLM",
    layer=_hunyuan_layer,
    reads=frozenset({"attention_bias"}),
    rope={"dynamic": frozenset({"alpha"})},
    allows={"use_qk_norm": (True,), "use_cla": (False,)},
    harmless=frozenset({"eod_token_id"}),
    tiny={
        **TINY, "num_hidden_layers": 2,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 1000.0},
    },
)  # fmt: skip


def _jais2_layer(config: Config) -> list[str]:
    biases = "qkvo" if config.get("attention_bias", True) else ""
    found = layer(biases, mlp_biases=bool(config.get("mlp_bias", True)))
    norms = ["input_layernorm.bias", "post_attention_layernorm.bias"]
    return [*norms, *ungated(found)]


ARCHITECTURES["jais2"] = Architecture(
    summary="Jais 2: Llama's layers with LayerNorms and biases, and squared ReLU in an MLP without a gate.",
    model_class="Jais2ForCausalLM",
    layer=_jais2_layer,
    names=_LAYER_NORM,
    unread=frozenset({"rms_norm_eps"}),
    reads=frozenset({"attention_bias", "mlp_bias", "layer_norm_eps"}),
    size=ModelSize.ungated,
    gguf=Gguf("jais2", config=lambda facts: {**biases(facts), "hidden_act": "relu2"}),
    tiny={
        **tiny_without("rms_norm_eps"), "num_hidden_layers": 2, "layer_norm_eps": 1e-5,
        "hidden_act": "relu2", "attention_bias": True, "mlp_bias": True,
    },
)  # fmt: skip


def _nemotron_layer(config: Config) -> list[str]:
    found = biased_layer(config)
    norms = ["input_layernorm.bias", "post_attention_layernorm.bias"]
    return [*norms, *ungated(found)]


ARCHITECTURES["nemotron"] = Architecture(
    summary="Nemotron 4 and Minitron: LayerNorms that add 1 to their weight, half of each head rotated, squared ReLU.",
    model_class="NemotronForCausalLM",
    layer=_nemotron_layer,
    names=_LAYER_NORM,
    unread=frozenset({"rms_norm_eps"}),
    reads=frozenset({"attention_bias", "mlp_bias", "norm_eps", "partial_rotary_factor"}),
    size=ModelSize.ungated,
    gguf=Gguf("nemotron", config=lambda facts: {**biases(facts), "hidden_act": "relu2"}, norm_offset=1),
    tiny={
        **tiny_without("rms_norm_eps"), "num_hidden_layers": 2, "norm_eps": 1e-5,
        "hidden_act": "relu2",
    },
)  # fmt: skip


def _cache(config: Config) -> CacheShape:
    """With `use_sliding_window`, layers without rotary positions have a window."""
    every, layers = config.get("no_rope_layer_interval", 4), range(config["num_hidden_layers"])
    rotated = config.get("no_rope_layers") or [(i + 1) % every for i in layers]
    types = [SLIDING if config.get("use_sliding_window") and not rotated[i] else "full_attention" for i in layers]
    return attention_cache({**config, "layer_types": config.get("layer_types") or types})


ARCHITECTURES["smollm3"] = Architecture(
    summary="SmolLM3: Llama's layers; some have no rotary positions, by a list or at an interval.",
    model_class="SmolLM3ForCausalLM",
    layer=biased_layer,
    reads=frozenset({
        "attention_bias", "mlp_bias", "use_sliding_window", "sliding_window", "no_rope_layers",
        "no_rope_layer_interval", "layer_types",
    }),
    allows={"pretraining_tp": (1, 2)},
    harmless=frozenset({"max_window_layers"}),
    cache=_cache,
    size=tied_size,
    gguf=Gguf(
        "smollm3", config=lambda facts: {**biases(facts), "no_rope_layer_interval": 4}, interleaved=True
    ),
    tiny={**TINY, "num_hidden_layers": 2, "no_rope_layers": [1, 0], "pad_token_id": 0},
)  # fmt: skip


def _stablelm_layer(config: Config) -> list[str]:
    parts = [*layer("qkv" if config.get("use_qkv_bias") else ""), "input_layernorm.bias"]
    if config.get("use_parallel_residual"):
        parts.remove("post_attention_layernorm.weight")
    else:
        parts.append("post_attention_layernorm.bias")
    if config.get("qk_layernorm"):
        heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
        parts += [f"self_attn.{name}_layernorm.norms.{i}.weight" for name, count in heads.items() for i in range(count)]
    return parts


ARCHITECTURES["stablelm"] = Architecture(
    summary="StableLM: Llama's layers with LayerNorm, a part of each head rotated, and optional per-head norms.",
    model_class="StableLmForCausalLM",
    layer=_stablelm_layer,
    names=_LAYER_NORM,
    unread=frozenset({"head_dim", "rms_norm_eps"}),
    reads=frozenset({
        "layer_norm_eps", "use_qkv_bias", "qk_layernorm", "use_parallel_residual", "partial_rotary_factor",
    }),
    harmless=frozenset({"rope_pct", "rotary_scaling_factor"}),
    sharding=rules(
        _LAYER_NORM, **PROJECTIONS,
        up=r"mlp\.(?:gate|up)_proj", down=r"mlp\.down_proj",
    ),
    gguf=Gguf(
        "stablelm", keys={"use_parallel_residual": "use_parallel_residual"},
        config=lambda facts: {"use_qkv_bias": "blk.0.attn_q.bias" in facts, "qk_layernorm": False},
    ),
    tiny={
        **tiny_without("head_dim", "rms_norm_eps"),
        "num_hidden_layers": 2, "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "use_qkv_bias": True,
    },
)  # fmt: skip


def _starcoder2_layer(config: Config) -> list[str]:
    linear = [*(f"self_attn.{name}_proj" for name in "qkvo"), "mlp.c_fc", "mlp.c_proj"]
    norms = with_biases("input_layernorm", "post_attention_layernorm")
    return norms + (with_biases(*linear) if config.get("use_bias", True) else [f"{name}.weight" for name in linear])


ARCHITECTURES["starcoder2"] = Architecture(
    summary=(
        "StarCoder 2: grouped heads, LayerNorm, optional biases everywhere, an MLP without a gate, a sliding window."
    ),
    model_class="Starcoder2ForCausalLM",
    layer=_starcoder2_layer,
    names=_LAYER_NORM,
    derived=tied_by_default,
    unread=frozenset({"head_dim", "rms_norm_eps"}),
    reads=frozenset({"norm_epsilon", "use_bias", "sliding_window"}),
    allows={"mlp_type": ("default",), "norm_type": ("layer_norm",)},
    harmless=frozenset({"residual_dropout", "embedding_dropout"}),
    sharding=rules(
        _LAYER_NORM, **PROJECTIONS,
        up=r"mlp\.c_fc", down=r"mlp\.c_proj",
    ),
    size=ModelSize.ungated,
    gguf=Gguf("starcoder2", config=lambda facts: {
        "hidden_act": "gelu_pytorch_tanh", "use_bias": "blk.0.attn_q.bias" in facts, "sliding_window": None,
    }),
    tiny={
        **tiny_without("head_dim", "rms_norm_eps"),
        "num_hidden_layers": 2, "norm_epsilon": 1e-5, "hidden_act": "gelu_pytorch_tanh", "sliding_window": WINDOW,
        "tie_word_embeddings": True,
    },
)  # fmt: skip
