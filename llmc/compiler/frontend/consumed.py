"""Check that every tensor and key of a checkpoint is read: an unread one shows that the model is a different one.

Verification would miss the error, because the same transformers code builds the reference from the same configuration.
Keys with one meaning in every architecture are here, specific ones in architectures/. Any other key or tensor is
refused by name. A key that is null switches nothing on.

Duplicate facts have to agree: a configuration with its own lists, and with the tensors next to it. Otherwise the model
would not fit the tensors or would compute other numbers, and the first error would name neither. Only file headers and
the vocabulary are read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from llmc.compiler.architectures import require_supported
from llmc.compiler.architectures.shared.architectures import architecture
from llmc.errors import CheckpointError, NoTokenizerError

if TYPE_CHECKING:
    from llmc.compiler.architectures.shared.base import Architecture
    from llmc.compiler.checkpoint.base import Checkpoint


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


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Architectures' names for the number of a layer's experts."""
USED = ("num_experts_per_tok", "top_k_experts", "moe_k")
"""Architectures' names for the number of experts per token."""
_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")


def _contradictions(checkpoint: Checkpoint) -> Iterator[str]:
    config = checkpoint.config
    yield from _layers(config, checkpoint.tensor_names())
    yield from _windows(config)
    yield from _experts(config)
    yield from _vocabulary(checkpoint)


def _layers(config: dict[str, Any], tensors: list[str]) -> Iterator[str]:
    count = config.get("num_hidden_layers")
    if not isinstance(count, int):
        return
    for name in ("layer_types", "layers_block_type"):
        listed = config.get(name)
        if isinstance(listed, list) and len(listed) != count:
            yield f"num_hidden_layers is {count}, and {name} lists {len(listed)} layers"
    held = {int(found[1]) for name in tensors if (found := _LAYER.search(f".{name}"))}
    if held and max(held) + 1 < count:
        yield f"num_hidden_layers is {count}, and the tensors are of {max(held) + 1} layers"


def _windows(config: dict[str, Any]) -> Iterator[str]:
    """A configuration without the window key uses its architecture's default."""
    window, types = config.get("sliding_window"), config.get("layer_types")
    if type(window) is int and window < 1 and config.get("use_sliding_window") is not False:
        yield f"sliding_window is {window}, which no token is in (null switches it off)"
    sliding = isinstance(types, list) and "sliding_attention" in types
    if sliding and (("sliding_window" in config and window is None) or config.get("use_sliding_window") is False):
        yield "layer_types has sliding_attention, and sliding_window is null or switched off"


def _experts(config: dict[str, Any]) -> Iterator[str]:
    experts = next((config[name] for name in EXPERTS if isinstance(config.get(name), int)), None)
    for name in USED:
        if experts and isinstance(used := config.get(name), int) and not 0 < used <= experts:
            yield f"{name} is {used}, and a layer has {experts} experts"


def _vocabulary(checkpoint: Checkpoint) -> Iterator[str]:
    """Added tokens of a tokenizer may lie beyond the embedding, as Gemma 3's image tokens do."""
    size = checkpoint.config.get("vocab_size")
    if not isinstance(size, int):
        return
    names = architecture(checkpoint.config).names
    for name in sorted({names.embedding, names.lm_head}.intersection(checkpoint.tensor_names())):
        if (rows := checkpoint.shape(name)[0]) != size:
            yield f"vocab_size is {size}, and {name} has {rows} rows"
    if (largest := _largest_id(checkpoint)) >= size:
        yield f"vocab_size is {size}, and the tokenizer's vocabulary has token id {largest}"


def _largest_id(checkpoint: Checkpoint) -> int:
    """Largest id in the tokenizer's own vocabulary, or -1 if unknown. Raises CheckpointError for a damaged one."""
    try:
        model = json.loads(checkpoint.tokenizer_json())["model"]
        vocabulary = model["vocab"]
        ids = vocabulary.values() if isinstance(vocabulary, dict) else [len(vocabulary) - 1]
        return max((i for i in ids if type(i) is int), default=-1)
    except (NoTokenizerError, KeyError, TypeError, ValueError):
        return -1


SHOWN = 3

COMPUTED = (".rotary_emb.inv_freq", ".position_ids", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")
"""Name endings of tensors that older versions of transformers wrote and that the configuration determines."""


def require_readable(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError for an unsupported architecture, and for what `require_consumed` refuses."""
    require_supported(checkpoint.config)
    require_consumed(checkpoint)


def require_consumed(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError for unread tensors or keys, naming the first ones, and for contradictions. Tensors of
    selectable adapters are read by the modules that they change."""
    checkpoint = checkpoint.of_adapter(0)
    for said in _contradictions(checkpoint):
        raise CheckpointError(
            f"{checkpoint.path}: {said}; the files are of two models, or config.json was edited: fetch them again"
        )
    keys = list(_left_over_keys(checkpoint.config))
    if keys:
        raise CheckpointError(
            f"{checkpoint.path}: the configuration has {_shown(keys)}, which nothing reads in architecture "
            f"{checkpoint.config['model_type']!r}, and which could make it another model; if it does not affect "
            "results, take it out of config.json; otherwise the model is not supported"
        )
    needed = tensor_names(checkpoint.config)
    computed = (*COMPUTED, *architecture(checkpoint.config).computed)
    ignored = architecture(checkpoint.config).ignored(checkpoint.config)
    tensors = [
        name
        for name in checkpoint.tensor_names()
        if name not in needed and not name.endswith(computed) and not (ignored and re.fullmatch(ignored, name))
    ]
    if tensors:
        raise CheckpointError(
            f"{checkpoint.path}: nothing in architecture {checkpoint.config['model_type']!r} takes the tensors "
            f"{_shown(tensors)}: its configuration lacks the keys for them, or the model is not supported"
        )


def tensor_names(config: Mapping[str, Any]) -> set[str]:
    """Names of all tensors that the model of a supported configuration has, including a tied lm_head."""
    return architecture(config).tensor_names(config)


def _left_over_keys(config: Mapping[str, Any]) -> Iterator[str]:
    own = architecture(config)
    stated = own.in_common_terms({name: v for name, v in config.items() if name not in own.unread})
    known = READ - own.unread | own.reads | own.harmless | frozenset().union(*HARMLESS.values())
    known |= {*own.keys, *own.keys.values(), *own.derived(stated)}
    neutral = {**NEUTRAL, **own.allows}
    for name, value in config.items():
        if value is None or name in known or any(value == allowed for allowed in neutral.get(name, ())):
            continue
        if name == "rope_scaling" and not config.get("rope_parameters"):  # only then does transformers read it
            yield from _left_over_rope(name, value, own)
        else:
            yield f"{name}: {value!r:.60}"
    if config.get("rope_parameters"):
        yield from _left_over_rope("rope_parameters", config["rope_parameters"], own)


def _left_over_rope(where: str, rope: Any, own: Architecture) -> Iterator[str]:
    if not isinstance(rope, Mapping):
        yield f"{where}: {rope!r:.60}"
        return
    if "layer_types" in own.reads and rope and all(isinstance(part, Mapping) for part in rope.values()):
        for kind, part in rope.items():
            yield from _left_over_rope(f"{where}.{kind}", part, own)
        return
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ROPE:
        yield f"{where}.rope_type: {kind!r:.60}"
        return
    read = ROPE[kind] | own.reads | own.rope.get(kind, frozenset()) | {"rope_type", "type", "rope_theta"}
    for name, value in rope.items():
        if value is None or name in read:
            continue
        if not any(value == allowed for allowed in NEUTRAL.get(name, ())):
            yield f"{where}.{name}: {value!r:.60}"


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
