"""Nothing of a checkpoint may be left over: a tensor or a key that nothing reads says that the model is another one.

The reference is built by the same transformers code from the same configuration, so it would agree with the error. What
is read is listed here for the supported architectures; beside that, names that change no number, each group with its
reason. Whatever else is there is refused by name. A key that is null switches nothing on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from llmc.compiler.checkpoint.base import EMBEDDING, HEAD
from llmc.errors import CheckpointError

if TYPE_CHECKING:
    from llmc.compiler.checkpoint.base import Checkpoint

SHOWN = 3

READ = frozenset({
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "rope_theta",
    "tie_word_embeddings",
})  # fmt: skip
"""Keys that every architecture reads."""
READ_BY: Mapping[str, frozenset[str]] = {
    "llama": frozenset({"attention_bias", "mlp_bias"}),
    "mistral": frozenset({"sliding_window"}),
    "qwen2": frozenset({"layer_types", "sliding_window", "use_sliding_window", "max_window_layers"}),
    "qwen3": frozenset({"layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "attention_bias"}),
}
"""Keys that one of them reads beside."""

NEUTRAL: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "": {
        "pretraining_tp": (1,), "partial_rotary_factor": (1, 1.0), "is_encoder_decoder": (False,),
        "add_cross_attention": (False,), "tie_encoder_decoder": (False,), "chunk_size_feed_forward": (0,),
        "pruned_heads": ({},), "rope_interleaved": (False,), "use_mrope": (False,), "mlp_bias": (False,),
        "use_sliding_window": (False,), "use_qk_norm": (False,), "logit_scale": (1, 1.0), "rope_scaling": ({},),
        "attention_bias": (False,), "clip_qkv": (False,),
    },
    "qwen2": {"attention_bias": (True,)},
}  # fmt: skip
"""Keys that nothing reads, with the values that say what is done anyway; "" for any architecture without its own."""

HARMLESS: Mapping[str, frozenset[str]] = {
    "says what the model is, and where it came from": frozenset({
        "model_type", "architectures", "_name_or_path", "_commit_hash", "transformers_version", "dtype", "torch_dtype",
        "auto_map", "tokenizer_class", "unsloth_version", "unsloth_fixed", "is_llama_config", "transformers.js_config",
        "max_sequence_length", "is_decoder", "name_or_path",
    }),
    "used in training alone": frozenset({
        "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "initializer_range",
        "gradient_checkpointing", "neftune_noise_alpha", "use_bfloat16", "tf_legacy_loss",
    }),
    "for classification heads, which are not compiled": frozenset({
        "id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params",
    }),
    "about outputs and caches of transformers, which have no part here": frozenset({
        "use_cache", "output_attentions", "output_hidden_states", "output_scores", "return_dict", "torchscript",
        "return_dict_in_generate", "_attn_implementation", "attn_implementation", "_attn_implementation_autoset",
        "cross_attention_hidden_size",
    }),
    "about sampling, and read as such where at all": frozenset({
        "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "decoder_start_token_id",
        "temperature", "top_k", "top_p", "typical_p", "num_beams", "num_beam_groups", "do_sample", "max_length",
        "min_length", "max_new_tokens", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "early_stopping", "diversity_penalty",
        "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id",
        "forced_eos_token_id", "remove_invalid_values", "prefix",
    }),
}  # fmt: skip
"""Keys that change no number that is compiled, by reason."""

ROPE: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "yarn": frozenset({
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
        "mscale_all_dim", "truncate",
    }),
    "longrope": frozenset({
        "factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor",
    }),
    "llama3": frozenset({"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"}),
}  # fmt: skip
"""Members of `rope_parameters` that each of its types reads, beside "rope_type" and "rope_theta"."""

COMPUTED = (".rotary_emb.inv_freq", ".position_ids", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")
"""How names of tensors end that older versions of transformers wrote, and that are computed from the configuration."""


def require_consumed(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError, naming the first of them, where the checkpoint has tensors or keys that nothing reads."""
    keys = list(_left_over_keys(checkpoint.config))
    if keys:
        raise CheckpointError(
            f"{checkpoint.path}: the configuration says {_shown(keys)}, which nothing reads in architecture "
            f"{checkpoint.config['model_type']!r}: the model would be another one, and its reference too; if that "
            "changes no number, take it out of config.json; else the model is not supported"
        )
    needed = tensor_names(checkpoint.config)
    tensors = [name for name in checkpoint.tensor_names() if name not in needed and not name.endswith(COMPUTED)]
    if tensors:
        raise CheckpointError(
            f"{checkpoint.path}: nothing in architecture {checkpoint.config['model_type']!r} takes the tensors "
            f"{_shown(tensors)}: its configuration leaves out what they are for, or the model is not supported"
        )


def tensor_names(config: Mapping[str, Any]) -> set[str]:
    """The names of every tensor that the model of a supported configuration has; a tied head's too."""
    kind = config["model_type"]
    attention_bias = kind == "qwen2" or (kind != "mistral" and bool(config.get("attention_bias")))
    parts = ["input_layernorm.weight", "post_attention_layernorm.weight"]
    parts += [f"self_attn.{name}_proj.weight" for name in "qkvo"]
    parts += [f"self_attn.{name}_proj.bias" for name in ("qkv" if kind == "qwen2" else "qkvo") if attention_bias]
    parts += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"] if kind == "qwen3" else []
    ends = ("weight", "bias") if kind == "llama" and config.get("mlp_bias") else ("weight",)
    parts += [f"mlp.{name}_proj.{end}" for name in ("gate", "up", "down") for end in ends]
    layers = range(int(config["num_hidden_layers"]))
    return {EMBEDDING, "model.norm.weight", HEAD, *(f"model.layers.{i}.{part}" for i in layers for part in parts)}


def _left_over_keys(config: Mapping[str, Any]) -> Iterator[str]:
    kind = str(config["model_type"])
    known = READ | READ_BY[kind] | frozenset().union(*HARMLESS.values())
    neutral = {**NEUTRAL[""], **NEUTRAL.get(kind, {})}
    for name, value in config.items():
        if value is None or name in known or any(value == allowed for allowed in neutral.get(name, ())):
            continue
        if name == "rope_scaling" and not config.get("rope_parameters"):  # as transformers takes it
            yield from _left_over_rope(name, value)
        else:
            yield f"{name}: {value!r:.60}"
    if config.get("rope_parameters"):
        yield from _left_over_rope("rope_parameters", config["rope_parameters"])


def _left_over_rope(where: str, rope: Any) -> Iterator[str]:
    if not isinstance(rope, Mapping):
        yield f"{where}: {rope!r:.60}"
        return
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ROPE:
        yield f"{where}.rope_type: {kind!r:.60}"
        return
    for name, value in rope.items():
        if value is None or name in ("rope_type", "type", "rope_theta") or name in ROPE[kind]:
            continue
        if not any(value == allowed for allowed in NEUTRAL[""].get(name, ())):
            yield f"{where}.{name}: {value!r:.60}"


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
