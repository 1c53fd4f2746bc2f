"""fp8: float8 e4m3 matrices in which tiles, mostly of 128 × 128 values, or all values share a scale.

A matrix W [.., N, K] of type F8_E4M3 has its scales in W_scale_inv or W_scale. With a `weight_block_size` of [rows,
inputs] they are [N / rows, K / inputs], rounded up; without, a single number. They are float32 or powers of two
(`ue8m0`). Values are computed in float32, as in the reference before it rounds to the model's dtype. Settings of
activations (`activation_scheme`, their scales) change no weight and are ignored.

Sources: transformers 5.23, integrations/finegrained_fp8.py (Fp8Dequantize) and utils/quantization_config.py
(FineGrainedFP8Config); DeepSeek-V3's README_WEIGHTS.md ("FP8 weight documentation").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmc.compiler.checkpoint.quantised.base import ACTIVATIONS, Reading, StoredTensors
from llmc.compiler.checkpoint.quantised.small_floats import FLOAT8, Float8Tensor, stated_tile

_SCALES = ("_scale_inv", "_scale")
_LEFT_OUT = ("input_scale", "activation_scale", "output_scale", "k_scale", "v_scale")


def read(stated: Mapping[str, Any], stored: StoredTensors) -> Reading:
    """Read a folder's fp8 tensors."""
    size = stated.get("weight_block_size")
    tile = None if size is None else stated_tile(size, "weight_block_size", stored)
    names = [name for name in stored.names() if stored.dtype(name) == FLOAT8]
    if not names:
        raise stored.error(f"quantization_config says fp8, but no tensor is of type {FLOAT8}: fetch it again")
    tensors = {}
    for name in names:
        scale = next((name + end for end in _SCALES if name + end in stored), name + _SCALES[0])
        tensors[name] = Float8Tensor(stored, name, scale, tile)
    left_out = frozenset(name for name in stored.names() if name.endswith(_LEFT_OUT))
    return Reading(tensors, left_out, (ACTIVATIONS,) if left_out or stated.get("activation_scheme") else ())
