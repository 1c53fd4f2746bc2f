"""Keys of config.json with one meaning in every architecture; specific keys are in the architectures' files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

READ = frozenset({
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "rope_theta",
    "tie_word_embeddings",
})  # fmt: skip
"""Keys that every architecture reads."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "pretraining_tp": (1,), "partial_rotary_factor": (1, 1.0), "is_encoder_decoder": (False,),
    "add_cross_attention": (False,), "tie_encoder_decoder": (False,), "chunk_size_feed_forward": (0,),
    "pruned_heads": ({},), "rope_interleaved": (False,), "use_mrope": (False,), "mlp_bias": (False,),
    "use_sliding_window": (False,), "use_qk_norm": (False,), "logit_scale": (1, 1.0), "rope_scaling": ({},),
    "attention_bias": (False,), "clip_qkv": (False,),
}  # fmt: skip
"""Unread keys → the values that match llmc's behaviour, unless an architecture overrides them."""

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
"""Keys that change no compiled value, by reason."""

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
    "proportional": frozenset({"factor", "partial_rotary_factor"}),
    "llama3": frozenset({"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"}),
}  # fmt: skip
"""Members of `rope_parameters` that each type reads, besides "rope_type" and "rope_theta"."""
