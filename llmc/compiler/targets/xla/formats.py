"""Formats of weights and cache other than the compute dtype.

A quantized matrix is two inputs of every step: its quantized weights under its own name, and NAME_scale, a float32 for
each row (weights/recipes.py), with the layers first where they are rolled. The suffix "_scale" is also vLLM's.

An fp8 cache holds float8 e4m3 with scale 1, as vLLM's does for a checkpoint without scales of its own
(BaseKVCacheMethod.process_weights_after_loading, vLLM 0.11); values beyond 448 are clipped to 448.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmc.compiler.architectures.shared.experts import is_router
from llmc.compiler.options import Option
from llmc.compiler.program.program import DTYPES
from llmc.compiler.weights.stage import SCALE, Described, Stack

if TYPE_CHECKING:
    from llmc.compiler.options import CompileOptions

QUANTIZED_DTYPES: Mapping[str, str] = {"int8": "int8", "fp8": "float8_e4m3fn"}
"""The dtype of a matrix by quantization."""

KV_CACHES: Mapping[str, str] = {**DTYPES, "fp8": "float8_e4m3fn"}
"""The dtype of keys and values by the option's name."""

KV_CACHE_DTYPE: Option[str | None] = Option(
    "kv_cache_dtype", str, None, "Precision of the KV cache. Default: --dtype.", metavar="f32|bf16|fp8",
    choices=tuple(KV_CACHES), what="KV cache dtype",
)  # fmt: skip


def cache_dtype(options: CompileOptions) -> str:
    """Return the KV cache precision: as requested, or that of everything else."""
    return KV_CACHE_DTYPE.of(options) or options.dtype


def described_as(rolled: bool, quantize: str) -> Stack | None:
    """Return the function from the traced program's tensors to the executables'; None where they are the same."""
    if not rolled and quantize == "none":
        return None
    return lambda described: _quantised(_stack(described) if rolled else described, quantize)


def _stack(described: Sequence[Described]) -> list[Described]:
    from llmc.compiler.targets.xla.scan_layers import stacked_names

    known = {d["name"]: d for d in described}
    found = []
    for name, sources in stacked_names({d["name"]: tuple(d["shape"]) for d in described}).items():
        first = known[sources[0]]
        if "*" in name:
            first = {
                **first, "name": name, "shape": [len(sources), *first["shape"]],
                "sources": [s for source in sources for s in known[source]["sources"]],
            }  # fmt: skip
        found.append(first)
    return found


def _quantised(described: Sequence[Described], quantize: str) -> list[Described]:
    """The tensors with every matrix as quantized weights and scales; unchanged for "none"."""
    if quantize == "none":
        return list(described)
    found: list[Described] = []
    for tensor in described:
        if not _is_matrix(tensor):
            found.append(tensor)
            continue
        scales = {"name": tensor["name"] + SCALE, "shape": tensor["shape"][:-1], "dtype": "float32"}
        found += [
            {**tensor, "transform": f"{quantize}_codes", "dtype": QUANTIZED_DTYPES[quantize]},
            {**tensor, "transform": f"{quantize}_scales", **scales},
        ]
    return found


def _is_matrix(tensor: Mapping[str, Any]) -> bool:
    """Whether it is multiplied or looked up by rows, unlike norms, biases and tables. Routers are not quantized."""
    rank = len(tensor["shape"]) - ("*" in tensor["name"])
    return tensor["transform"] != "table" and rank == 2 and not is_router(tensor["name"])
