"""Build a transformers 5 config from GGUF metadata, for architectures with a GGUF form (architectures/).

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Every value is checked, because a wrong number would
give a model that runs and generates nonsense. Layer count, hidden size and vocabulary must agree with the tensors.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from llmc.compiler.architectures.shared.architectures import architecture, by_gguf_architecture
from llmc.compiler.architectures.shared.base import Architecture
from llmc.compiler.architectures.shared.gguf_form import Gguf, GgufFacts
from llmc.compiler.checkpoint.gguf_file import GgufHeader, StringArray
from llmc.errors import CheckpointError

MAX_LAYERS = 4096
ROPE_FACTORS = "rope_freqs.weight"
ROPE_LONG, ROPE_SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = frozenset({ROPE_FACTORS, ROPE_LONG, ROPE_SHORT})
"""Tensors that become members of `rope_parameters`."""
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_epsilon")
READ = frozenset({
    "embedding_length", "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.value_length", "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon",
    "rope.dimension_count", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "context_length", "feed_forward_length", "block_count",
})  # fmt: skip
"""Metadata from which a configuration is built, without the architecture prefix."""

NEUTRAL: dict[str, tuple[Any, ...] | None] = {
    "vocab_size": None, "tensor_data_layout": None, "rope.scaling.finetuned": None,  # notes; the embedding has the size
    "expert_count": (0,), "expert_used_count": (0,), "expert_group_count": (0, 1), "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,), "expert_weights_norm": (False,), "expert_weights_scale": (0, 1),
    "expert_gating_func": (1,),  # softmax
    "attention.sliding_window": (0,), "attention.causal": (True,), "use_parallel_residual": (False,),
    "rope.scale_linear": (0, 1), "rope.scaling.yarn_ext_factor": (1,), "logit_scale": (1,), "residual_scale": (1,),
    "embedding_scale": (1,), "attention.clamp_kqv": (0,), "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
}  # fmt: skip
"""Unread metadata → the values that match llmc's behaviour; None: any value, because the key is only a note."""

YARN = {
    "rope.scaling.yarn_beta_fast": ("beta_fast", 32), "rope.scaling.yarn_beta_slow": ("beta_slow", 1),
    "rope.scaling.yarn_attn_factor": ("attention_factor", 1), "rope.scaling.attn_factor": ("attention_factor", 1),
}  # fmt: skip
"""Metadata for yarn → member of `rope_parameters`, and the value that matches other kinds of scaling."""
PREDICTORS = "nextn_predict_layers"
"""Number of last layers that predict further tokens, for an architecture that ignores them."""

_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL = 1.0, 4.0, 8192


@dataclass(frozen=True)
class Metadata:
    """Typed, checked access to metadata; `{arch}` in a key stands for the architecture. Raises CheckpointError."""

    header: GgufHeader

    @cached_property
    def arch(self) -> str:
        """general.architecture. Raises CheckpointError for an unsupported architecture."""
        arch = self.text("general.architecture")
        known = by_gguf_architecture()
        if arch not in known:
            raise self.error(
                f"architecture {arch!r} is not supported in GGUF files; supported: {', '.join(known)}. Other models "
                "compile from their Hugging Face folder"
            )
        return arch

    @cached_property
    def model_type(self) -> str:
        facts = GgufFacts(self.own, self.header.tensors, {})
        names = by_gguf_architecture()[self.arch]
        with suppress(TypeError, ValueError):  # of metadata of a wrong type, which no variant has
            for name in names:
                if (form := architecture({"model_type": name}).gguf) and form.suits(facts):
                    return name
        raise self.error(f"this variant of the architecture {self.arch!r} is not supported")

    @cached_property
    def own(self) -> dict[str, Any]:
        """Metadata of the architecture, without its prefix; floats as their shortest decimals."""
        prefix = f"{self.arch}."
        return {
            key.removeprefix(prefix): _short(value) if isinstance(value, float) else value
            for key, value in self.header.metadata.items()
            if key.startswith(prefix)
        }

    @cached_property
    def layers(self) -> int:
        """Number of the model's layers, without those that predict further tokens. Raises CheckpointError."""
        stated = self.integer("{arch}.block_count")
        found = {name.split(".")[1] for name in self.header.tensors if name.startswith("blk.") and name.count(".") > 1}
        further = self.integer(f"{{arch}}.{PREDICTORS}", 0, least=0) if PREDICTORS in self.gguf.reads else 0
        layers = stated - further
        needed = {str(index) for index in range(min(layers, MAX_LAYERS))}
        if not 0 < layers <= stated <= MAX_LAYERS or not needed <= found <= {str(i) for i in range(stated)}:
            raise self.error(f"damaged or incomplete: {stated} layers stated, tensors of {len(found)} found")
        return layers

    @cached_property
    def architecture(self) -> Architecture:
        return architecture({"model_type": self.model_type})

    @cached_property
    def gguf(self) -> Gguf:
        found = self.architecture.gguf
        assert found is not None  # the architecture is one of those in GGUF files
        return found

    def error(self, what: str) -> CheckpointError:
        return self.header.file.error(what)

    def get(self, key: str) -> Any:
        if "{arch}" in key:
            key = key.replace("{arch}", self.arch)
        return self.header.metadata.get(key)

    def text(self, key: str, default: str | None = None) -> str:
        value = self.get(key)
        if isinstance(value, str):
            return value
        if value is None and default is not None:
            return default
        raise self._bad(key, value, "a string")

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        """An integer of at least `least`, also as a per-layer array in which all values that are not 0 agree."""
        value = self.get(key)
        if isinstance(value, np.ndarray) and value.size:
            different = np.unique(value[value != 0])
            value = different[0].item() if len(different) == 1 else 0 if not len(different) else value
        if value is None and default is not None:
            return default
        if type(value) is not int or not least <= value < 2**31:
            raise self._bad(key, value, f"an integer of at least {least}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
            raise self._bad(key, value, "a positive number")
        return float(value)

    def strings(self, key: str) -> list[str]:
        value = self.get(key)
        if not isinstance(value, StringArray):
            raise self._bad(key, value, "an array of strings")
        return list(value)

    def _bad(self, key: str, value: Any, wanted: str) -> CheckpointError:
        found = "missing" if value is None else f"{value!r:.80}"
        return self.error(f"metadata {key} is {found}, but {wanted} is needed; the file is damaged or incomplete")


def build_config(meta: Metadata) -> dict[str, Any]:
    """Build the config, in common terms. Raises CheckpointError for an unsupported architecture or feature, or a
    contradiction."""
    _require_read(meta)
    own, form, tensors = meta.architecture, meta.gguf, meta.header.tensors
    epsilon = next((name for name in _EPSILONS if name in {_EPSILONS[0], *own.reads} - own.unread), _EPSILONS[0])
    config: dict[str, Any] = {
        "vocab_size": _vocab_size(meta),
        "hidden_size": meta.integer("{arch}.embedding_length"),
        "intermediate_size": meta.integer("{arch}.feed_forward_length", 0, least=0),
        "num_hidden_layers": meta.layers,
        "hidden_act": "silu",
        "max_position_embeddings": meta.integer("{arch}.context_length"),
        epsilon: _epsilon(meta),
        "tie_word_embeddings": "output.weight" not in tensors,
        **_attention(meta),
    }
    for key, name in form.keys.items():
        if (value := meta.own.get(key)) is not None:
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise meta.error(f"damaged: metadata {meta.arch}.{key} is {value!r:.80}, not a number")
            config[name] = value
    try:
        with np.errstate(all="raise"):
            config |= form.config(GgufFacts(meta.own, tensors, config))
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise meta.error(f"damaged or incomplete: the metadata of {meta.arch} cannot be read ({error!r})") from error
    for name in own.unread:
        config.pop(name, None)
    notes = {"model_type": meta.model_type, "architectures": [own.model_class], "dtype": "float32", **token_ids(meta)}
    return own.in_common_terms({**notes, **{own.keys.get(name, name): value for name, value in config.items()}})


def _epsilon(meta: Metadata) -> float:
    names = [f"{{arch}}.attention.layer_norm_{kind}epsilon" for kind in ("rms_", "")]
    key = next((name for name in names if meta.get(name) is not None), names[0])
    return _short(meta.number(key))


def _attention(meta: Metadata) -> dict[str, Any]:
    """Heads and positions; empty for a model without attention."""
    unread = meta.architecture.unread
    if "num_attention_heads" in unread:
        return {}
    hidden, heads = meta.integer("{arch}.embedding_length"), meta.integer("{arch}.attention.head_count")
    kv_heads = meta.integer("{arch}.attention.head_count_kv", heads, least=0)
    context = meta.integer("{arch}.context_length")
    if "attention.kv_lora_rank" in meta.own:  # latent attention, whose architecture has its own sizes
        rotated = meta.integer("{arch}.rope.dimension_count")
        return {
            "num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": rotated,
            "rope_parameters": _rope(meta, rotated, context),
        }  # fmt: skip
    head_dim = meta.integer("{arch}.attention.key_length", hidden // heads)
    if head_dim < 2 or head_dim % 2:
        raise meta.error(f"damaged: {hidden} hidden units over {heads} heads give heads of odd size {head_dim}")
    if meta.integer("{arch}.attention.value_length", head_dim) != head_dim:
        raise meta.error("keys and values of different head size are not supported")
    if kv_heads and heads % kv_heads:
        raise meta.error(f"damaged: {heads} attention heads do not divide over {kv_heads} K/V heads")
    found: dict[str, Any] = {
        "num_attention_heads": heads, "num_key_value_heads": kv_heads or heads, "head_dim": head_dim,
    }  # fmt: skip
    if "rope_parameters" in unread:
        return found
    rotated = meta.integer("{arch}.rope.dimension_count", head_dim)
    found["rope_parameters"] = _rope(meta, rotated, context)
    if rotated != head_dim:
        if rotated > head_dim or "partial_rotary_factor" not in meta.architecture.reads:
            raise meta.error(f"rotary embedding of {rotated} of {head_dim} values of each head is not supported")
        found["rope_parameters"]["partial_rotary_factor"] = rotated / head_dim
    return found


def _require_read(meta: Metadata) -> None:
    """Raise CheckpointError for metadata that may change results and that nothing here reads. By the format, other
    namespaces than the architecture's hold notes and the tokenizer, except an adapter's."""
    prefix, form = f"{meta.arch}.", meta.gguf
    for key in meta.header.metadata:
        if key.startswith("adapter."):
            raise meta.error(f"metadata {key}: the file is an adapter, not a model; merge it into its model first")
    for name in meta.own.keys() - READ - form.keys.keys() - form.reads:
        key, value = prefix + name, meta.own[name]
        if name in YARN and (str(meta.own.get("rope.scaling.type")) == "yarn" or ROPE_LONG in meta.header.tensors):
            continue
        allowed = (YARN[name][1],) if name in YARN else form.neutral.get(name, NEUTRAL.get(name, ()))
        if allowed is not None and not any(np.all(value == one) for one in allowed):
            raise meta.error(
                f"metadata {key} is {value!r:.80}, which is not supported and may change the model's results (if it "
                "changes none, remove the key with gguf's gguf_editor)"
            )
    scaled = meta.number("{arch}.rope.scaling.factor", 1.0) != 1.0
    if scaled and (ROPE_FACTORS in meta.header.tensors or meta.text("{arch}.rope.scaling.type", "none") == "none"):
        raise meta.error(
            f"metadata {prefix}rope.scaling.factor scales positions, but {prefix}rope.scaling.type does not say how; "
            "this model variant is not supported"
        )


def token_ids(meta: Metadata) -> dict[str, int | None]:
    """bos_token_id, eos_token_id and pad_token_id; None if the file does not state them."""
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {
        name: None if meta.get(key) is None else meta.integer(key, least=0)
        for name, key in ((name, f"tokenizer.ggml.{short}_token_id") for name, short in keys.items())
    }


def _short(value: float) -> float:
    """The shortest decimal that is this float32 (9.999999747378752e-06 was written as 1e-05)."""
    return float(str(np.float32(value)))


def _vocab_size(meta: Metadata) -> int:
    embedding = meta.header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise meta.error("no token_embd.weight: a vocabulary-only or incomplete GGUF; use one with weights")
    vocab, hidden = embedding.shape
    if hidden != meta.integer("{arch}.embedding_length"):
        raise meta.error(f"damaged: token_embd.weight has {hidden} columns, not the stated embedding length")
    return vocab


def _rope(meta: Metadata, rotated: int, context: int) -> dict[str, Any]:
    """`rope_parameters` for heads of which `rotated` values are rotated."""
    tensors = meta.header.tensors
    theta = _short(meta.number("{arch}.rope.freq_base", 10000.0))
    kind = meta.text("{arch}.rope.scaling.type", "none")
    original = meta.integer("{arch}.rope.scaling.original_context_length", context)
    if ROPE_FACTORS in tensors:
        return _llama3_rope(meta, rotated, theta)
    if ROPE_LONG in tensors and ROPE_SHORT in tensors:
        long, short = (_divisors(meta, name, rotated).tolist() for name in (ROPE_LONG, ROPE_SHORT))
        return {
            "rope_type": "longrope", "rope_theta": theta, "long_factor": long, "short_factor": short,
            "original_max_position_embeddings": original, "factor": context / original, **_yarn(meta),
        }  # fmt: skip
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    factor = _short(meta.number("{arch}.rope.scaling.factor", 1.0))
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if kind == "yarn":
        return {
            "rope_type": "yarn", "rope_theta": theta, "factor": factor, "original_max_position_embeddings": original,
            **_yarn(meta),
        }  # fmt: skip
    raise meta.error(f"rope scaling {kind!r} is not supported; supported: none, linear, yarn, llama3, longrope")


def _yarn(meta: Metadata) -> dict[str, float]:
    return {name: _short(meta.number(f"{{arch}}.{key}")) for key, (name, _) in YARN.items() if key in meta.own}


def _divisors(meta: Metadata, name: str, rotated: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Stored divisors of the frequencies, [rotated / 2]."""
    info = meta.header.tensors[name]
    if info.type != "F32" or info.shape != (rotated // 2,):
        raise meta.error(f"{name} is {info.type} {list(info.shape)}, expected F32 [{rotated // 2}]")
    divisors = np.array([_short(one) for one in meta.header.raw(info).view("<f4")])
    if not (np.isfinite(divisors).all() and (divisors > 0).all()):
        raise meta.error(f"damaged: {name} holds values that are not positive")
    return divisors


def _llama3_rope(meta: Metadata, head_dim: int, theta: float) -> dict[str, Any]:
    """Recover Llama 3 scaling parameters from the stored frequency divisors, [head_dim/2], or refuse the file. All
    published Llama 3.x models share low and high factors and the original context; the scale is the largest divisor."""
    divisors = _divisors(meta, ROPE_FACTORS, head_dim)
    if not (divisors >= 1).all():
        raise meta.error(f"damaged: {ROPE_FACTORS} holds values that are not at least 1")
    factor = float(divisors.max())
    turns = _LLAMA3_ORIGINAL / (2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim))
    smooth = np.clip((turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0.0, 1.0)
    if not np.allclose(1 / ((1 - smooth) / factor + smooth), divisors, rtol=1e-3):
        raise meta.error(f"{ROPE_FACTORS} does not follow the Llama 3 rule; other frequency factors are not supported")
    if factor == 1.0:
        return {"rope_type": "default", "rope_theta": theta}
    return {
        "rope_type": "llama3", "rope_theta": theta, "factor": _short(factor), "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH, "original_max_position_embeddings": _LLAMA3_ORIGINAL,
    }  # fmt: skip
