"""Llama, models that differ from it in details, and similar decoders: Mistral, Granite, Cohere, OLMo and Phi."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmc.compiler.architectures.shared.base import TINY, WINDOW, Architecture, tied_by_default, tiny_without
from llmc.compiler.architectures.shared.cache import SLIDING, Config, attention_cache, cache_in_turn
from llmc.compiler.architectures.shared.experts import EXPERT_RULES, Experts, ExpertsSize, expert_layer
from llmc.compiler.architectures.shared.gguf_form import (
    WINDOWS,
    Gguf,
    GgufFacts,
    attention_bias,
    biases,
    expert_keys,
    windows,
)
from llmc.compiler.architectures.shared.names import LM_HEAD, Names, biased_layer, layer, ungated, with_biases
from llmc.compiler.architectures.shared.sharding import PACKED_RULES, PROJECTIONS, rules
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


def _norms_after(parts: list[str]) -> list[str]:
    """Norms on the outputs of both blocks instead of their inputs."""
    return ["post_feedforward_layernorm.weight", *(part for part in parts if part != "input_layernorm.weight")]


ARCHITECTURES["exaone4"] = Architecture(
    summary="EXAONE 4: norms on block outputs instead of inputs; layers without a window have no rotary positions.",
    model_class="Exaone4ForCausalLM",
    layer=lambda config: _norms_after(layer(qk_norms=True)),
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


ARCHITECTURES["hunyuan_v1_dense"] = Architecture(
    summary="Hunyuan's dense models: Llama's layers with norms on queries and keys after the rotation.",
    model_class="HunYuanDenseV1ForCausalLM",
    layer=lambda config: [
        *biased_layer(config), "self_attn.query_layernorm.weight", "self_attn.key_layernorm.weight",
    ],
    reads=frozenset({"attention_bias"}),
    rope={"dynamic": frozenset({"alpha"})},
    allows={"use_qk_norm": (True,), "use_cla": (False,)},
    harmless=frozenset({"eod_token_id"}),
    tiny={
        **TINY, "num_hidden_layers": 2,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 1000.0},
    },
)  # fmt: skip


_NORM_BIASES = ("input_layernorm.bias", "post_attention_layernorm.bias")


ARCHITECTURES["jais2"] = Architecture(
    summary="Jais 2: Llama's layers with LayerNorms and biases, and squared ReLU in an MLP without a gate.",
    model_class="Jais2ForCausalLM",
    layer=lambda config: [
        *_NORM_BIASES, *ungated(biased_layer({"attention_bias": True, "mlp_bias": True, **config})),
    ],
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


ARCHITECTURES["nemotron"] = Architecture(
    summary="Nemotron 4 and Minitron: LayerNorms that add 1 to their weight, half of each head rotated, squared ReLU.",
    model_class="NemotronForCausalLM",
    layer=lambda config: [*_NORM_BIASES, *ungated(biased_layer(config))],
    names=_LAYER_NORM,
    unread=frozenset({"rms_norm_eps"}),
    reads=frozenset({"attention_bias", "mlp_bias", "norm_eps", "partial_rotary_factor"}),
    size=ModelSize.ungated,
    gguf=Gguf("nemotron", config=lambda facts: {**biases(facts), "hidden_act": "relu2"}, norm_offset=1),
    tiny={**tiny_without("rms_norm_eps"), "num_hidden_layers": 2, "norm_eps": 1e-5, "hidden_act": "relu2"},
)  # fmt: skip


def _smollm3_cache(config: Config) -> CacheShape:
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
    cache=_smollm3_cache,
    size=tied_size,
    gguf=Gguf("smollm3", config=lambda facts: {**biases(facts), "no_rope_layer_interval": 4}, interleaved=True),
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
    sharding=rules(_LAYER_NORM, **PROJECTIONS, up=r"mlp\.(?:gate|up)_proj", down=r"mlp\.down_proj"),
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
    summary="StarCoder 2: grouped heads, LayerNorm, optional biases everywhere, no gate in MLPs, a sliding window.",
    model_class="Starcoder2ForCausalLM",
    layer=_starcoder2_layer,
    names=_LAYER_NORM,
    derived=tied_by_default,
    unread=frozenset({"head_dim", "rms_norm_eps"}),
    reads=frozenset({"norm_epsilon", "use_bias", "sliding_window"}),
    allows={"mlp_type": ("default",), "norm_type": ("layer_norm",)},
    harmless=frozenset({"residual_dropout", "embedding_dropout"}),
    sharding=rules(_LAYER_NORM, **PROJECTIONS, up=r"mlp\.c_fc", down=r"mlp\.c_proj"),
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


def _ministral3_gguf(facts: GgufFacts) -> dict[str, Any]:
    rope = dict(facts.common["rope_parameters"])
    if (beta := facts.get("attention.temperature_scale")) is not None:
        rope["llama_4_scaling_beta"] = float(beta)
    if (log := facts.get("rope.scaling.yarn_log_multiplier")) is not None:
        rope |= {"mscale": float(log), "mscale_all_dim": float(log)}
    return {"rope_parameters": rope, "sliding_window": None}


ARCHITECTURES["ministral3"] = Architecture(
    summary="Ministral 3: Mistral's layers; queries are scaled by the logarithm of their position beyond a length.",
    model_class="Ministral3ForCausalLM",
    reads=frozenset({"sliding_window", "llama_4_scaling_beta"}),
    rope={"yarn": frozenset({"max_position_embeddings"})},  # transformers writes it there, and ignores it
    gguf=Gguf(
        "mistral3", config=_ministral3_gguf,
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
        "llama", keys=expert_keys("num_local_experts"), config=lambda facts: {"sliding_window": None}, interleaved=True,
        suits=lambda facts: bool(facts.get("expert_count")),
    ),
    tiny={**TINY, "num_hidden_layers": 2, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": WINDOW},
)  # fmt: skip


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
    summary="Granite with experts: Granite's multipliers; routing weights are normalised after the choice.",
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


def _cohere_layer(config: Config) -> list[str]:
    found = biased_layer(config, qk_norms=bool(config.get("use_qk_norm")))
    return [part for part in found if part != "post_attention_layernorm.weight"]


ARCHITECTURES["cohere"] = Architecture(
    summary="Cohere's Command R: attention and MLP read one norm in parallel; norms subtract the mean; RoPE of pairs.",
    model_class="CohereForCausalLM",
    layer=_cohere_layer,
    unread=frozenset({"rms_norm_eps"}),
    reads=frozenset({"attention_bias", "layer_norm_eps", "logit_scale", "use_qk_norm"}),
    harmless=frozenset({"model_max_length"}),
    size=tied_size,
    gguf=Gguf(
        "command-r", keys={"logit_scale": "logit_scale"},
        config=lambda facts: {
            **attention_bias(facts), "use_qk_norm": "blk.0.attn_q_norm.weight" in facts,
        },
    ),
    tiny={
        **tiny_without("head_dim", "rms_norm_eps"), "num_hidden_layers": 2,
        "tie_word_embeddings": True, "layer_norm_eps": 1e-5, "logit_scale": 0.5, "use_qk_norm": True,
    },
)  # fmt: skip


ARCHITECTURES["cohere2"] = replace(
    ARCHITECTURES["cohere"],
    summary="Cohere's Command R7B and A: Command R's layers; layers without a window have no rotary positions.",
    model_class="Cohere2ForCausalLM",
    reads=frozenset({
        "attention_bias", "layer_norm_eps", "logit_scale", "sliding_window", "layer_types", "sliding_window_pattern",
    }),
    allows={
        "layer_switch": (4,), "order_of_interleaved_layers": ("local_attn_first",), "rotary_pct": (1, 1.0),
        "position_embedding_type": ("rope_gptj",), "use_embedding_sharing": (True,), "use_gated_activation": (True,),
        "use_parallel_block": (True,), "use_parallel_embedding": (False,),
    },
    harmless=frozenset({"cache_implementation", "model_max_length"}),
    cache=cache_in_turn(4),
    gguf=Gguf("cohere2", keys={"logit_scale": "logit_scale"}, config=windows(4), reads=WINDOWS),
    tiny={
        **tiny_without("head_dim", "rms_norm_eps"), "num_hidden_layers": 2,
        "tie_word_embeddings": True, "layer_norm_eps": 1e-5, "logit_scale": 0.5, "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
    },
)  # fmt: skip


ARCHITECTURES["olmo"] = Architecture(
    summary="OLMo: Llama's layers with LayerNorms without weights; a key clips queries, keys and values.",
    model_class="OlmoForCausalLM",
    layer=lambda config: [part for part in biased_layer(config) if "layernorm" not in part],
    names=Names(others=lambda config: []),
    unread=frozenset({"rms_norm_eps", "head_dim"}),
    reads=frozenset({"attention_bias", "clip_qkv"}),
    gguf=Gguf("olmo", keys={"attention.clamp_kqv": "clip_qkv"}, interleaved=True),
    tiny={**tiny_without("rms_norm_eps", "head_dim"), "num_hidden_layers": 2, "clip_qkv": 1.5},
)  # fmt: skip


def _olmo3_gguf(facts: GgufFacts) -> dict[str, Any]:
    """Layers with a window rotate without scaling."""
    rope = facts.common["rope_parameters"]
    theta = float(facts.get("rope.freq_base_swa", rope["rope_theta"]))
    return {
        **windows(4)(facts),
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": theta}, "full_attention": rope,
        },
    }  # fmt: skip


ARCHITECTURES["olmo2"] = Architecture(
    summary="OLMo 2: norms on block outputs instead of inputs; queries and keys normalised over all heads together.",
    model_class="Olmo2ForCausalLM",
    layer=lambda config: _norms_after(biased_layer(config, qk_norms=True)),
    reads=frozenset({"attention_bias"}),
    gguf=Gguf("olmo2", suits=lambda facts: not facts.get("attention.sliding_window")),
    tiny={**tiny_without("head_dim"), "num_hidden_layers": 2},
)


ARCHITECTURES["olmo3"] = Architecture(
    summary="OLMo 3: OLMo 2's layers, some with a sliding window; the others may scale their RoPE.",
    model_class="Olmo3ForCausalLM",
    layer=lambda config: _norms_after(biased_layer(config, qk_norms=True)),
    reads=frozenset({"attention_bias", "sliding_window", "layer_types"}),
    cache=cache_in_turn(4),
    gguf=Gguf(
        "olmo2", config=_olmo3_gguf, reads=WINDOWS | {"rope.freq_base_swa"},
        suits=lambda facts: bool(facts.get("attention.sliding_window")),
    ),
    tiny={
        **tiny_without("head_dim"), "num_hidden_layers": 2, "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"], "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
                "attention_factor": 1.2, "beta_fast": 8.0, "beta_slow": 1.0,
            },
        },
    },
)  # fmt: skip


ARCHITECTURES["olmoe"] = Architecture(
    summary="OLMoE: queries and keys are normalised over all heads together; each token uses some of many small MLPs.",
    model_class="OlmoeForCausalLM",
    layer=lambda config: expert_layer(biased_layer(config, qk_norms=True)),
    reads=frozenset({"num_experts", "num_experts_per_tok", "norm_topk_prob", "attention_bias"}),
    harmless=frozenset({"router_aux_loss_coef", "output_router_logits"}),
    experts=Experts(("num_experts",)),
    sharding=EXPERT_RULES,
    size=ExpertsSize.reading(("num_experts",), "num_experts_per_tok"),
    fused={"linear": 5, "rms_norm": 2},
    gguf=Gguf("olmoe", keys=expert_keys("num_experts"), config=lambda facts: {"norm_topk_prob": False}),
    tiny={**TINY, "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2},
)


_PHI_NAMES = Names(others=lambda config: [*with_biases("model.final_layernorm"), "lm_head.bias"])


def _phi_layer(config: Config) -> list[str]:
    parts = [*(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "dense")), "mlp.fc1", "mlp.fc2"]
    norms = ["self_attn.q_layernorm", "self_attn.k_layernorm"] if config.get("qk_layernorm") else []
    return with_biases("input_layernorm", *parts, *norms)


ARCHITECTURES["phi"] = Architecture(
    summary="Phi 1, 1.5 and 2: attention and MLP read the same norm, heads are partly rotated, lm_head has a bias.",
    model_class="PhiForCausalLM",
    layer=_phi_layer,
    names=_PHI_NAMES,
    unread=frozenset({"head_dim", "rms_norm_eps"}),
    reads=frozenset({"layer_norm_eps", "qk_layernorm", "partial_rotary_factor"}),
    sharding=rules(
        _PHI_NAMES, query=r"self_attn\.q_proj", keys=r"self_attn\.[kv]_proj", output=r"self_attn\.dense",
        up=r"mlp\.fc1", down=r"mlp\.fc2",
    ),
    size=ModelSize.ungated,
    gguf=Gguf("phi2", config=lambda facts: {"hidden_act": "gelu_new", "qk_layernorm": False}),
    tiny={
        **tiny_without("head_dim", "rms_norm_eps"),
        "num_hidden_layers": 2, "hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5,
    },
)  # fmt: skip


ARCHITECTURES["phi3"] = Architecture(
    summary="Phi-3 and Phi-4: Llama's layers with one tensor for q, k and v, and one for gate and up.",
    model_class="Phi3ForCausalLM",
    layer=lambda config: [
        "input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.qkv_proj.weight",
        "self_attn.o_proj.weight", "mlp.gate_up_proj.weight", "mlp.down_proj.weight",
    ],
    reads=frozenset({"original_max_position_embeddings", "partial_rotary_factor", "sliding_window"}),
    allows={"full_attn_mod": (1,), "interpolate_factor": (1,), "lm_head_bias": (False,)},
    sharding=PACKED_RULES,
    gguf=Gguf(
        "phi3", config=lambda facts: {
            "sliding_window": facts.get("attention.sliding_window") or None,
            "original_max_position_embeddings": facts.get(
                "rope.scaling.original_context_length", facts.common["max_position_embeddings"]
            ),
        }, reads=WINDOWS,
    ),
    tiny={
        **TINY, "num_hidden_layers": 2, "sliding_window": WINDOW, "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
)  # fmt: skip


def _phimoe_others(config: Config) -> list[str]:
    return [*with_biases("model.norm"), *(["lm_head.bias"] if config.get("lm_head_bias") else [])]


ARCHITECTURES["phimoe"] = Architecture(
    summary="Phi with experts (Phi-3.5-MoE): LayerNorm; each of two experts is weighted against similar scores.",
    model_class="PhimoeForCausalLM",
    layer=lambda config: [*expert_layer(biased_layer(config), ("router.weight",)), *_NORM_BIASES],
    names=Names(others=_phimoe_others, lm_head=LM_HEAD),
    reads=frozenset({
        "num_local_experts", "num_experts_per_tok", "router_jitter_noise", "attention_bias", "lm_head_bias",
    }),
    harmless=frozenset({"router_aux_loss_coef", "output_router_logits", "input_jitter_noise"}),
    experts=Experts(("num_local_experts",), "w123-router"),
    sharding=EXPERT_RULES,
    size=ExpertsSize.reading(("num_local_experts",), "num_experts_per_tok"),
    fused={"linear": 3, "rms_norm": 0},
    tiny={
        **TINY, "num_hidden_layers": 2, "num_local_experts": 8, "num_experts_per_tok": 2, "router_jitter_noise": 0.2,
        "attention_bias": True, "lm_head_bias": True,
    },
)  # fmt: skip
