"""Where the tensors of a model lie in a GGUF file, and how they differ there from transformers'.

Most names follow from the gguf package's tables. This module adds what a file splits, or shapes differently:

- Experts: gate and up are one tensor [E, 2 · N, K] in transformers, and two [E, N, K] in the file.
- Latent attention: kv_b_proj [H · (K + V), L] is [H, L, K] and [H, V, L] in the file.
- Recurrent layers: A is stored instead of log(-A), and vectors and convolutions have other shapes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from llmc.compiler.architectures.shared.gguf_form import Gguf
from llmc.compiler.checkpoint.base import FloatArray

Combine = Callable[[Sequence[FloatArray]], FloatArray]
"""The file's tensors → transformers'."""


@dataclass(frozen=True)
class StoredParts:
    """A tensor's parts in the file. `combine` is None if it is one part as it is, or the rows of several one after
    another (of each matrix, if they are stacked)."""

    parts: tuple[str, ...]
    combine: Combine | None = None
    turned: bool = False
    """Whether matrices [E, N, K] of the parts, row by row in turn, are [E, K, N] in transformers."""


def _turned(parts: Sequence[FloatArray]) -> FloatArray:
    rows = np.stack(parts, axis=2).reshape(parts[0].shape[0], -1, *parts[0].shape[2:])
    return rows.swapaxes(1, -1) if rows.ndim > 2 else rows


def _latent(parts: Sequence[FloatArray]) -> FloatArray:
    keys, values = parts
    rows = np.concatenate([keys.transpose(0, 2, 1), values], axis=1)
    return np.ascontiguousarray(rows.reshape(-1, rows.shape[2]))


def _one_row(parts: Sequence[FloatArray]) -> FloatArray:
    return parts[0].reshape(1, -1)


def _flat(parts: Sequence[FloatArray]) -> FloatArray:
    return parts[0].reshape(-1)


def _log_negative(parts: Sequence[FloatArray]) -> FloatArray:
    values = np.log(-parts[0])
    return values.reshape(-1) if values.shape[-1] == 1 else values


def _convolution(parts: Sequence[FloatArray]) -> FloatArray:
    return parts[0][:, None, :]


_BLOCK = re.compile(r"(?:\w+\.)*(?:layers|h|blocks|layer)\.(\d+)\.(.+)")
_TURNED = re.compile(r"mlp\.experts\.(gate_up|down)_proj(_bias)?")
_EXTRA: tuple[tuple[re.Pattern[str], tuple[str, ...], Combine | None], ...] = tuple(
    (re.compile(pattern), parts, combine)
    for pattern, parts, combine in (
        (r".*experts\.gate_up_proj", ("ffn_gate_exps.weight", "ffn_up_exps.weight"), None),
        (r".*experts\.gate_up_proj", ("ffn_gate_up_exps.weight",), None),
        (r".*experts\.(up|down)_proj", (r"ffn_\1_exps.weight",), None),
        (r"mlp\.gate\.moe_statics\.e_score_correction_bias", ("exp_probs_b.bias",), _one_row),
        (r"mlp\.gate\.e_score_correction_bias", ("exp_probs_b.bias",), None),
        (r"block_sparse_moe\.router\.weight", ("ffn_gate_inp.weight",), None),
        (r"shared_mlp\.input_linear\.weight", ("ffn_gate_shexp.weight", "ffn_up_shexp.weight"), None),
        (r"shared_mlp\.input_linear\.weight", ("ffn_gate.weight", "ffn_up.weight"), None),
        (r"shared_mlp\.output_linear\.weight", ("ffn_down.weight",), None),
        (r"self_attn\.kv_b_proj\.weight", ("attn_k_b.weight", "attn_v_b.weight"), _latent),
        (r"self_attn\.sinks", ("attn_sinks.weight",), None),
        (r"(?:mixer|mamba)\.A_log", ("ssm_a",), _log_negative),
        (r"(?:mixer|mamba)\.D", ("ssm_d",), _flat),
        (r"(?:mixer|mamba)\.dt_bias", ("ssm_dt.bias",), None),
        (r"(?:mixer|mamba)\.norm\.weight", ("ssm_norm.weight",), _flat),
        (r"(?:mixer|mamba)\.conv1d\.weight", ("ssm_conv1d.weight",), _convolution),
        (r"conv\.conv\.weight", ("shortconv.conv.weight",), _convolution),
    )
)
"""Parts of names within a layer → the file's, which the table lacks."""


def sources(gguf: Gguf, names: Collection[str], layers: int, stored: Container[str]) -> dict[str, StoredParts]:
    """transformers' names of a model's tensors → where the file has them; tensors that it lacks are left out."""
    found: dict[str, StoredParts] = {}
    for name in names:
        for source in _candidates(gguf, name, layers):
            if all(part in stored for part in source.parts):
                found[name] = source
                break
    return found


def _candidates(gguf: Gguf, name: str, layers: int) -> Iterator[StoredParts]:
    if block := _BLOCK.fullmatch(name):
        number, part = block.groups()
        if gguf.turned_experts and (match := _TURNED.fullmatch(part)):
            kinds, ending = match[1].split("_"), "bias" if match[2] else "weight"
            turned = tuple(f"blk.{number}.ffn_{kind}_exps.{ending}" for kind in kinds)
            yield StoredParts(turned, _turned, turned=not match[2])
            return
        for pattern, parts, combine in _EXTRA:
            if match := pattern.fullmatch(part):
                yield StoredParts(tuple(f"blk.{number}.{match.expand(one)}" for one in parts), combine)
    if known := _table(gguf.architecture, layers).get_name(name, try_suffixes=(".weight", ".bias")):
        yield StoredParts((known,))


@lru_cache(maxsize=4)
def _table(architecture: str, layers: int) -> Any:
    """gguf's table of an architecture, or Llama's for one that the package does not know."""
    import gguf

    known = (arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    arch = next(known, gguf.MODEL_ARCH.LLAMA)
    return gguf.get_tensor_name_map(arch, layers)
