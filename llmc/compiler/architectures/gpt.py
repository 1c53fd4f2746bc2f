"""GPT-2 and models of its time: learned positions or ALiBi, LayerNorm, MLPs without a gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from llmc.compiler.architectures.shared.base import NO_ROPE, Architecture, tied_by_default
from llmc.compiler.architectures.shared.cache import Config
from llmc.compiler.architectures.shared.gguf_form import Gguf, GgufFacts
from llmc.compiler.architectures.shared.names import Names, with_biases
from llmc.compiler.architectures.shared.sharding import rules
from llmc.compiler.architectures.shared.size import ModelSize
from llmc.errors import CheckpointError

EMBEDDING = "transformer.wte.weight"
NAMES = Names(
    "transformer.h", EMBEDDING, others=lambda config: ["transformer.wpe.weight", *with_biases("transformer.ln_f")]
)
KEYS = {
    "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}  # fmt: skip
TINY = {
    "n_embd": 64, "n_inner": 96, "n_layer": 2, "n_head": 4, "n_positions": 128, "layer_norm_epsilon": 1e-5,
}  # fmt: skip
UNREAD = frozenset({"num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "intermediate_size"}) | NO_ROPE
SUMMARY = frozenset({
    "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
})  # fmt: skip
"""Keys for classification heads, which are not compiled."""


def derived(config: Mapping[str, Any], tied: bool = True) -> dict[str, Any]:
    """Common keys: `intermediate_size` defaults to 4 · hidden_size, tied embeddings to `tied`."""
    return {
        "intermediate_size": config.get("n_inner") or 4 * config["hidden_size"],
        "tie_word_embeddings": config.get("tie_word_embeddings", tied),
    }


def size(config: Mapping[str, Any], source: str, unused: int = 0) -> ModelSize:
    """Sizes with an MLP without a gate, and a table of learned positions behind `unused` rows."""
    positions = int(config.get("max_position_embeddings") or 0) + unused
    return replace(ModelSize.ungated(config, source), positions=positions)


ARCHITECTURES: dict[str, Architecture] = {}

ARCHITECTURES["gpt2"] = Architecture(
    summary="GPT-2: learned positions, LayerNorm, weights [in, out] (transformers' Conv1D), one tensor for q, k and v.",
    model_class="GPT2LMHeadModel",
    layer=lambda config: with_biases("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"),
    names=NAMES,
    computed=(".attn.bias", ".attn.masked_bias"),
    keys=KEYS,
    turned=frozenset({"c_attn", "c_proj", "c_fc"}),
    derived=derived,
    unread=UNREAD,
    reads=frozenset({
        "n_inner", "activation_function", "layer_norm_epsilon", "scale_attn_weights",
        "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn",
    }),
    harmless=SUMMARY | {"n_ctx"},
    sharding=rules(NAMES),
    size=size,
    tiny={**TINY, "scale_attn_by_inverse_layer_idx": True},
)  # fmt: skip


def _bigcode_derived(config: Config) -> dict[str, Any]:
    heads = 1 if config.get("multi_query", True) else config["num_attention_heads"]
    return {**derived(config), "num_key_value_heads": heads}


ARCHITECTURES["gpt_bigcode"] = replace(
    ARCHITECTURES["gpt2"],
    summary="GPT-BigCode (StarCoder, SantaCoder): GPT-2's layers with weights [out, in] and one KV head.",
    model_class="GPTBigCodeForCausalLM",
    turned=frozenset(),
    derived=_bigcode_derived,
    reads=frozenset({
        "n_inner", "activation_function", "layer_norm_epsilon", "scale_attn_weights", "multi_query",
        "scale_attention_softmax_in_fp32",
    }),
    harmless=SUMMARY | {
        "n_ctx", "attention_softmax_in_fp32", "inference_runner", "pre_allocate_kv_cache", "validate_runner_input",
        "max_batch_size", "max_sequence_length", "pad_key_length",
    },
    sharding=rules(NAMES, up=r"mlp\.c_fc", down=r"mlp\.c_proj", output=r"attn\.c_proj"),
    gguf=Gguf(
        "starcoder",
        config=lambda facts: {
            "n_inner": facts.common["intermediate_size"], "activation_function": "gelu_pytorch_tanh",
            "multi_query": facts.common["num_key_value_heads"] == 1,
        },
    ),
    tiny={**TINY, "multi_query": True},
)  # fmt: skip


GPTJ_NAMES = Names("transformer.h", EMBEDDING, others=lambda config: [*with_biases("transformer.ln_f"), "lm_head.bias"])


ARCHITECTURES["gptj"] = Architecture(
    summary="GPT-J: attention and MLP read one norm in parallel; RoPE rotates neighbours in a part of each head.",
    model_class="GPTJForCausalLM",
    layer=lambda config: [
        *with_biases("ln_1", "mlp.fc_in", "mlp.fc_out"),
        *(f"attn.{name}_proj.weight" for name in ("q", "k", "v", "out")),
    ],
    names=GPTJ_NAMES,
    computed=(".attn.bias", ".attn.masked_bias"),
    keys=KEYS,
    derived=lambda config: derived(config, tied=False),
    unread=UNREAD,
    reads=frozenset({"n_inner", "activation_function", "layer_norm_epsilon", "rotary_dim"}),
    allows={"scale_attn_weights": (True,)},
    harmless=SUMMARY | {"n_ctx", "rotary"},
    sharding=rules(
        GPTJ_NAMES, query=r"attn\.q_proj", keys=r"attn\.[kv]_proj", output=r"attn\.out_proj", up=r"mlp\.fc_in",
        down=r"mlp\.fc_out",
    ),
    size=ModelSize.ungated,
    tiny={**TINY, "rotary_dim": 8},
)  # fmt: skip


ARCHITECTURES["codegen"] = replace(
    ARCHITECTURES["gptj"],
    summary="CodeGen: GPT-J's layers with queries, values and keys in one tensor, in four parts.",
    model_class="CodeGenForCausalLM",
    layer=lambda config: [
        *with_biases("ln_1", "mlp.fc_in", "mlp.fc_out"), "attn.qkv_proj.weight", "attn.out_proj.weight",
    ],
    computed=(".attn.causal_mask", ".attn.bias", ".attn.masked_bias"),
    sharding=rules(GPTJ_NAMES, output=r"attn\.out_proj", up=r"mlp\.fc_in", down=r"mlp\.fc_out"),
)  # fmt: skip


NEOX_NAMES = Names(
    "gpt_neox.layers", "gpt_neox.embed_in.weight", others=lambda config: with_biases("gpt_neox.final_layer_norm"),
    stored={"embed_out.weight": "lm_head.weight"},
)  # fmt: skip


def _neox_layer(config: Config) -> list[str]:
    attention = ["attention.query_key_value", "attention.dense"]
    parts = with_biases("input_layernorm", "post_attention_layernorm", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
    if config.get("attention_bias", True):
        return parts + with_biases(*attention)
    return parts + [f"{name}.weight" for name in attention]


def _rope(config: Config) -> dict[str, Any]:
    """transformers 5 calls `rotary_pct` partial_rotary_factor, and `rotary_emb_base` rope_theta."""
    if config.get("rope_parameters"):
        return {}
    base, part = config.get("rotary_emb_base", 10000), config.get("rotary_pct", 0.25)
    return {"rope_parameters": {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": part}}


ARCHITECTURES["gpt_neox"] = Architecture(
    summary="GPT-NeoX (Pythia): attention and MLP may run in parallel; heads are partly rotated; biases everywhere.",
    model_class="GPTNeoXForCausalLM",
    layer=_neox_layer,
    names=NEOX_NAMES,
    computed=(".attention.bias", ".attention.masked_bias", ".attention.rotary_emb.inv_freq"),
    derived=_rope,
    unread=frozenset({"num_key_value_heads", "head_dim", "rms_norm_eps"}),
    reads=frozenset({"layer_norm_eps", "use_parallel_residual", "attention_bias", "partial_rotary_factor"}),
    harmless=frozenset({"classifier_dropout", "rotary_pct", "rotary_emb_base"}),
    sharding=rules(
        NEOX_NAMES, query=r"attention\.query_key_value", output=r"attention\.dense", up=r"mlp\.dense_h_to_4h",
        down=r"mlp\.dense_4h_to_h",
    ),
    size=ModelSize.ungated,
    tiny={
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 128, "hidden_act": "gelu", "layer_norm_eps": 1e-5, "use_parallel_residual": True,
        "rotary_pct": 0.5, "tie_word_embeddings": False,
    },
)  # fmt: skip


BLOOM_NAMES = Names(
    "transformer.h", "transformer.word_embeddings.weight",
    others=lambda config: with_biases("transformer.word_embeddings_layernorm", "transformer.ln_f"),
)  # fmt: skip
LINEAR = ("self_attention.query_key_value", "self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
"""Modules of BLOOM's and Falcon's layers."""


def _bloom_derived(config: Config) -> dict[str, Any]:
    hidden = config.get("n_embed") or config["hidden_size"]
    return {"hidden_size": hidden, "intermediate_size": 4 * hidden, **tied_by_default(config)}


ARCHITECTURES["bloom"] = Architecture(
    summary="BLOOM: ALiBi instead of positions, LayerNorm, also after the embedding, and one tensor for q, k and v.",
    model_class="BloomForCausalLM",
    layer=lambda config: with_biases("input_layernorm", "post_attention_layernorm", *LINEAR),
    names=BLOOM_NAMES,
    keys={"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
    derived=_bloom_derived,
    unread=NO_ROPE | {
        "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "intermediate_size",
        "max_position_embeddings",
    },
    reads=frozenset({"layer_norm_epsilon", "apply_residual_connection_post_layernorm", "n_embed"}),
    harmless=frozenset({
        "pretraining_tp", "slow_but_exact", "seq_length", "skip_bias_add", "skip_bias_add_qkv", "offset_alibi",
        "masked_softmax_fusion", "bias_dropout_fusion", "attention_softmax_in_fp32", "unk_token_id",
    }),
    sharding=rules(
        BLOOM_NAMES, query=r"self_attention\.query_key_value", output=r"self_attention\.dense",
        up=r"mlp\.dense_h_to_4h", down=r"mlp\.dense_4h_to_h",
    ),
    size=ModelSize.ungated,
    tiny={"hidden_size": 64, "n_layer": 2, "n_head": 4, "layer_norm_epsilon": 1e-5},
)  # fmt: skip


FALCON_NAMES = Names(
    "transformer.h", "transformer.word_embeddings.weight", others=lambda config: with_biases("transformer.ln_f")
)
POSITIONS = 2048
"""transformers' default number of positions for ALiBi models that state none."""


def _falcon_layer(config: Config) -> list[str]:
    linear = with_biases(*LINEAR) if config.get("bias") else [f"{name}.weight" for name in LINEAR]
    return linear + with_biases(*_norms(config))


def _norms(config: Config) -> list[str]:
    if not config.get("parallel_attn", True):
        return ["input_layernorm", "post_attention_layernorm"]
    norms = config.get("num_ln_in_parallel_attn") or (2 if config.get("new_decoder_architecture") else 1)
    return ["ln_attn", "ln_mlp"] if norms == 2 else ["input_layernorm"]


def _falcon_derived(config: Config) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    if config.get("new_decoder_architecture"):
        groups = config.get("num_kv_heads") or heads
    else:
        groups = 1 if config.get("multi_query", True) else heads
    return {
        "num_key_value_heads": groups,
        "intermediate_size": config.get("ffn_hidden_size") or 4 * config["hidden_size"],
        "tie_word_embeddings": config.get("tie_word_embeddings", True),
        "max_position_embeddings": config.get("max_position_embeddings", POSITIONS if config.get("alibi") else None),
    }


def _falcon_gguf(facts: GgufFacts) -> dict[str, Any]:
    """Files are of Falcon 7B's form, with one norm, or of the newer one with two."""
    kv_heads, newer = facts.common["num_key_value_heads"], "blk.0.attn_norm_2.weight" in facts
    return {
        "new_decoder_architecture": newer, "num_kv_heads": kv_heads, "multi_query": kv_heads == 1,
        "parallel_attn": True, "bias": False, "alibi": False, "ffn_hidden_size": facts.common["intermediate_size"],
    }  # fmt: skip


def _falcon_rows(config: Config, name: str) -> list[int] | None:
    """The file has all queries, keys and values; transformers has the queries, key and value of each KV head."""
    if not name.endswith("query_key_value.weight"):
        return None
    heads, kv_heads = config["num_attention_heads"], config["num_kv_heads"]
    group, width = heads // kv_heads, config["hidden_size"] // heads
    order = [
        head for kv in range(kv_heads)
        for head in (*range(kv * group, (kv + 1) * group), heads + kv, heads + kv_heads + kv)
    ]  # fmt: skip
    return [head * width + row for head in order for row in range(width)]


ARCHITECTURES["falcon"] = Architecture(
    summary="Falcon: attention and MLP in parallel, one or several KV heads, RoPE or ALiBi.",
    model_class="FalconForCausalLM",
    layer=_falcon_layer,
    names=FALCON_NAMES,
    computed=(".self_attention.rotary_emb.inv_freq",),
    derived=_falcon_derived,
    unread=frozenset({"head_dim", "hidden_act", "rms_norm_eps", "intermediate_size", "num_key_value_heads"}),
    reads=frozenset({
        "num_ln_in_parallel_attn", "layer_norm_epsilon", "num_kv_heads", "new_decoder_architecture", "multi_query",
        "parallel_attn", "bias", "ffn_hidden_size", "activation", "alibi",
    }),
    allows={"apply_residual_connection_post_layernorm": (False,)},
    harmless=frozenset({"ff_factor"}),
    sharding=rules(FALCON_NAMES, output=r"self_attention\.dense", up=r"mlp\.dense_h_to_4h", down=r"mlp\.dense_4h_to_h"),
    size=ModelSize.ungated,
    gguf=Gguf("falcon", config=_falcon_gguf, neutral={"context_length": None}, rows=_falcon_rows),
    tiny={
        "hidden_size": 64, "ffn_hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_kv_heads": 2,
        "max_position_embeddings": 128, "new_decoder_architecture": True, "layer_norm_epsilon": 1e-5,
    },
)  # fmt: skip


MPT_NAMES = Names("transformer.blocks", "transformer.wte.weight", others=lambda config: ["transformer.norm_f.weight"])
_ATTENTION = {
    "attn_type": "multihead_attention", "prefix_lm": False, "qk_ln": False, "attn_uses_sequence_id": False,
    "alibi": True, "alibi_bias_max": 8,
}  # fmt: skip
"""Members of `attn_config` that transformers does not read, with the values that it implements."""


def _mpt_derived(config: Config) -> dict[str, Any]:
    said = config.get("attn_config") or {}
    other = next((name for name, value in _ATTENTION.items() if said.get(name, value) != value), None)
    if other is not None:
        raise CheckpointError(
            f"config.json: attn_config has {other} {said[other]!r}, but transformers computes {_ATTENTION[other]!r}: "
            "the model is not supported"
        )
    return {"intermediate_size": 4 * config["hidden_size"], **tied_by_default(config)}


ARCHITECTURES["mpt"] = Architecture(
    summary="MPT: ALiBi instead of positions, no biases, one tensor for q, k and v.",
    model_class="MptForCausalLM",
    layer=lambda config: [
        f"{part}.weight" for part in ("norm_1", "attn.Wqkv", "attn.out_proj", "norm_2", "ffn.up_proj", "ffn.down_proj")
    ],
    names=MPT_NAMES,
    keys={
        "hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
        "max_position_embeddings": "max_seq_len",
    },
    derived=_mpt_derived,
    unread=NO_ROPE | {"num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "intermediate_size"},
    reads=frozenset({"attn_config", "layer_norm_epsilon"}),
    allows={
        "no_bias": (True,), "expansion_ratio": (4,), "logit_scale": (None,),
        "norm_type": ("low_precision_layernorm", "layernorm"),
    },
    harmless=frozenset({"learned_pos_emb", "init_device", "init_config", "embedding_fraction", "emb_pdrop", "verbose"}),
    sharding=rules(MPT_NAMES, output=r"attn\.out_proj", up=r"ffn\.up_proj", down=r"ffn\.down_proj"),
    size=ModelSize.ungated,
    tiny={
        "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 128, "layer_norm_epsilon": 1e-5,
        "attn_config": {"clip_qkv": 1.5},
    },
)  # fmt: skip


OPT_PARTS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj", "self_attn_layer_norm", "fc1",
    "fc2", "final_layer_norm",
)  # fmt: skip


def _opt_layer(config: Config) -> list[str]:
    biased = config.get("enable_bias", True)
    affine = config.get("layer_norm_elementwise_affine", True)
    linear = [name for name in OPT_PARTS if "norm" not in name]
    norms = with_biases(*(name for name in OPT_PARTS if "norm" in name)) if affine else []
    return norms + (with_biases(*linear) if biased else [f"{name}.weight" for name in linear])


def _others(config: Config) -> list[str]:
    found = ["embed_positions.weight"]
    if config.get("word_embed_proj_dim", config["hidden_size"]) != config["hidden_size"]:
        found += ["project_in.weight", "project_out.weight"]
    if config.get("do_layer_norm_before", True) and not config.get("_remove_final_layer_norm"):
        found += with_biases("final_layer_norm") if config.get("layer_norm_elementwise_affine", True) else []
    return [f"model.decoder.{name}" for name in found]


OPT_NAMES = Names("model.decoder.layers", "model.decoder.embed_tokens.weight", others=_others)


ARCHITECTURES["opt"] = Architecture(
    summary="OPT: learned positions from row 2 on, LayerNorm, ReLU; embeddings may be narrower than the layers.",
    model_class="OPTForCausalLM",
    layer=_opt_layer,
    names=OPT_NAMES,
    keys={"intermediate_size": "ffn_dim"},
    derived=tied_by_default,
    unread=NO_ROPE | {"intermediate_size", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps"},
    reads=frozenset({
        "ffn_dim", "activation_function", "do_layer_norm_before", "word_embed_proj_dim", "enable_bias",
        "layer_norm_elementwise_affine", "_remove_final_layer_norm",
    }),
    harmless=frozenset({"dropout", "layerdrop", "init_std", "activation_dropout"}),
    sharding=rules(
        OPT_NAMES, query=r"self_attn\.q_proj", keys=r"self_attn\.[kv]_proj", output=r"self_attn\.out_proj", up="fc1",
        down="fc2",
    ),
    size=partial(size, unused=2),
    tiny={
        "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 128, "do_layer_norm_before": True,
    },
)  # fmt: skip
