"""Build a transformers 5 config from GGUF metadata, for architectures with a GGUF form (architectures/).

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Every value is checked, because a wrong number would
give a model that runs and generates nonsense. Layer count, hidden size and vocabulary must agree with the tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from llmc.compiler.architectures.shared.architectures import architecture, by_gguf_architecture
from llmc.compiler.architectures.shared.base import Architecture, Gguf
from llmc.compiler.checkpoint.gguf_header import GgufHeader, StringArray
from llmc.errors import CheckpointError

MAX_LAYERS = 4096
ROPE_FACTORS = "rope_freqs.weight"
READ = frozenset({
    "expert_count", "attention.sliding_window", "embedding_length", "attention.head_count", "attention.head_count_kv",
    "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon", "rope.dimension_count",
    "rope.freq_base", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
    "context_length", "feed_forward_length", "block_count",
})  # fmt: skip
"""Metadata from which a configuration is built, without the architecture prefix."""

NEUTRAL: dict[str, tuple[Any, ...] | None] = {
    "vocab_size": None, "tensor_data_layout": None, "rope.scaling.finetuned": None,  # notes; the embedding has the size
    "expert_used_count": (0,), "attention.causal": (True,), "use_parallel_residual": (False,),
    "rope.scale_linear": (0, 1), "rope.scaling.attn_factor": (1,), "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (1,), "rope.scaling.yarn_beta_fast": (32,), "rope.scaling.yarn_beta_slow": (1,),
    "logit_scale": (1,), "residual_scale": (1,), "embedding_scale": (1,), "attention.clamp_kqv": (0,),
    "attn_logit_softcapping": (0,), "final_logit_softcapping": (0,),
}  # fmt: skip
"""Metadata that is not read, with the values that match llmc's behaviour; None: any value, because the key is only a
note."""

_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL = 1.0, 4.0, 8192


@dataclass(frozen=True)
class Metadata:
    """Typed, checked access to metadata; `{arch}` in a key stands for the architecture."""

    header: GgufHeader

    @cached_property
    def arch(self) -> str:
        """general.architecture. Raises CheckpointError for an unsupported architecture."""
        arch = self.text("general.architecture")
        known = by_gguf_architecture()
        if arch not in known:
            raise self.error(f"architecture {arch!r} is not supported; supported: {', '.join(known)}")
        return arch

    @cached_property
    def model_type(self) -> str:
        """transformers' model type of the architecture."""
        return by_gguf_architecture()[self.arch]

    @cached_property
    def architecture(self) -> Architecture:
        """The `Architecture` of the model type."""
        return architecture({"model_type": self.model_type})

    @cached_property
    def gguf(self) -> Gguf:
        """The architecture's form in GGUF files."""
        found = self.architecture.gguf
        assert found is not None  # the architecture is one of those in GGUF files
        return found

    def error(self, what: str) -> CheckpointError:
        """A CheckpointError about the file."""
        return self.header.file.error(what)

    def get(self, key: str) -> Any:
        """A value, or None."""
        if "{arch}" in key:
            key = key.replace("{arch}", self.arch)
        return self.header.metadata.get(key)

    def text(self, key: str, default: str | None = None) -> str:
        """A string. Raises CheckpointError."""
        value = self.get(key)
        if isinstance(value, str):
            return value
        if value is None and default is not None:
            return default
        raise self._bad(key, value, "a string")

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        """An integer of at least `least`. A per-layer array is accepted if all layers agree. Raises CheckpointError."""
        value = self.get(key)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        if value is None and default is not None:
            return default
        if type(value) is not int or not least <= value < 2**31:
            raise self._bad(key, value, f"an integer of at least {least}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number. Raises CheckpointError."""
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
            raise self._bad(key, value, "a positive number")
        return float(value)

    def strings(self, key: str) -> list[str]:
        """An array of strings. Raises CheckpointError."""
        value = self.get(key)
        if not isinstance(value, StringArray):
            raise self._bad(key, value, "an array of strings")
        return list(value)

    def _bad(self, key: str, value: Any, wanted: str) -> CheckpointError:
        found = "missing" if value is None else f"{value!r:.80}"
        return self.error(f"metadata {key} is {found}, but {wanted} is needed; the file is damaged or incomplete")


def build_config(header: GgufHeader) -> dict[str, Any]:
    """Build the config. Raises CheckpointError for an unsupported architecture or feature, or a contradiction."""
    meta = Metadata(header)
    arch, tensors = meta.arch, header.tensors
    if meta.integer("split.count", 1, least=0) > 1:
        raise meta.error("one part of a split GGUF; join the parts with `llama-gguf-split --merge`")
    for feature in meta.gguf.refused:
        if meta.integer(f"{{arch}}.{feature}", 0, least=0):
            raise meta.error(f"{arch}.{feature} is set: this model variant is not supported")
    _require_read(meta)
    hidden, heads = meta.integer("{arch}.embedding_length"), meta.integer("{arch}.attention.head_count")
    head_dim = meta.integer("{arch}.attention.key_length", hidden // heads)
    if head_dim < 2 or head_dim % 2:
        raise meta.error(f"damaged: {hidden} hidden units over {heads} heads give heads of odd size {head_dim}")
    if meta.integer("{arch}.attention.value_length", head_dim) != head_dim:
        raise meta.error("keys and values of different head size are not supported")
    if meta.integer("{arch}.rope.dimension_count", head_dim) != head_dim:
        raise meta.error("rotary embedding of only a part of each head is not supported")
    context = meta.integer("{arch}.context_length")
    config: dict[str, Any] = {
        "model_type": meta.model_type,
        "architectures": [meta.architecture.model_class],
        "vocab_size": _vocab_size(meta),
        "hidden_size": hidden,
        "intermediate_size": meta.integer("{arch}.feed_forward_length"),
        "num_hidden_layers": _layers(meta),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.integer("{arch}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": context,
        "rms_norm_eps": _short(meta.number("{arch}.attention.layer_norm_rms_epsilon")),
        "rope_parameters": _rope(meta, head_dim, context),
        "tie_word_embeddings": "output.weight" not in tensors,
        "dtype": "float32",
        **token_ids(meta),
    }
    if heads % config["num_key_value_heads"]:
        raise meta.error(
            f"damaged: {heads} attention heads do not divide over {config['num_key_value_heads']} K/V heads"
        )
    return config | meta.gguf.config(tensors)


def _require_read(meta: Metadata) -> None:
    """Raise CheckpointError for metadata that may change results and that nothing here reads.

    Outside the architecture's namespace only an adapter's metadata counts: by the format, other namespaces hold notes
    and the tokenizer.
    """
    prefix = f"{meta.arch}."
    for key, value in meta.header.metadata.items():
        name = key.removeprefix(prefix)
        if key.startswith("adapter."):
            raise meta.error(f"metadata {key}: the file is an adapter, not a model; merge it into its model first")
        if name == key or name in READ:
            continue
        allowed = NEUTRAL.get(name, ())
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


def _layers(meta: Metadata) -> int:
    stated = meta.integer("{arch}.block_count")
    found = {name.split(".")[1] for name in meta.header.tensors if name.startswith("blk.") and name.count(".") > 1}
    if stated > MAX_LAYERS or found != {str(index) for index in range(stated)}:
        raise meta.error(f"damaged or incomplete: {stated} layers stated, tensors of {len(found)} found")
    return stated


def _vocab_size(meta: Metadata) -> int:
    embedding = meta.header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise meta.error("no token_embd.weight: a vocabulary-only or incomplete GGUF; use one with weights")
    vocab, hidden = embedding.shape
    if hidden != meta.integer("{arch}.embedding_length"):
        raise meta.error(f"damaged: token_embd.weight has {hidden} columns, not the stated embedding length")
    return vocab


def _rope(meta: Metadata, head_dim: int, context: int) -> dict[str, Any]:
    theta = _short(meta.number("{arch}.rope.freq_base", 10000.0))
    kind = meta.text("{arch}.rope.scaling.type", "none")
    if ROPE_FACTORS in meta.header.tensors:
        return _llama3_rope(meta, head_dim, theta)
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    factor = _short(meta.number("{arch}.rope.scaling.factor", 1.0))
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if kind == "yarn":
        original = meta.integer("{arch}.rope.scaling.original_context_length", context)
        return {
            "rope_type": "yarn", "rope_theta": theta, "factor": factor,
            "original_max_position_embeddings": original,
        }  # fmt: skip
    raise meta.error(f"rope scaling {kind!r} is not supported; supported: none, linear, yarn, llama3")


def _llama3_rope(meta: Metadata, head_dim: int, theta: float) -> dict[str, Any]:
    """Recover Llama 3 scaling parameters from the stored frequency divisors, [head_dim/2].

    All published Llama 3.x models share low and high factors and the original context; the scale is the largest
    divisor. A file whose divisors do not follow this rule is refused rather than approximated.
    """
    info = meta.header.tensors[ROPE_FACTORS]
    if info.type != "F32" or info.shape != (head_dim // 2,):
        raise meta.error(f"{ROPE_FACTORS} is {info.type} {list(info.shape)}, expected F32 [{head_dim // 2}]")
    divisors = meta.header.raw(info).view("<f4").astype(np.float64)
    if not (np.isfinite(divisors).all() and (divisors >= 1).all()):
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
