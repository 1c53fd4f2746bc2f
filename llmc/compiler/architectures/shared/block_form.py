"""The form of a matrix that a checkpoint stores in blocks. Targets decide by it before any block is read."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Literal

LEAST_BLOCK = 16
"""Smallest number of weights per scale in ONNX Runtime's and OpenVINO's matmuls; blocks are multiples of it."""


@dataclass(frozen=True)
class BlockForm:
    """A matrix [N, K] in `bits` (4 or 8), of which `block` neighbours along K share a scale."""

    type: str
    """Name in the source: "Q4_1", "gptq"."""
    bits: int
    block: int
    offsets: Literal["", "zeros", "minimums"]
    """Per block, besides the scale: an integer zero point, a minimum, or neither (""), with zero point 2 ** (bits - 1).
    """
    scales: str = "float16"
    """The dtype that holds each scale: float16, bfloat16 or float32."""
    stored_bits: int = 0
    """Bits per weight in the source if fewer than `bits`, else 0."""
    order: tuple[int, ...] = ()
    """The input of each weight along K, if neighbours share a scale only in this order; () for the natural order."""
    table: Literal["", "iq4", "float4"] = ""
    """If set, each 8-bit weight is 128 plus one of 16 table values, so 4 bits suffice on a device with look-ups:
    IQ4_NL's values (iq4), or twice those of float4 e2m1."""
    turned: bool = False
    """For experts [E, K, N]: blocks are of each matrix transposed, [E · N, K]."""


def common_order(forms: Iterable[BlockForm | None]) -> tuple[int, ...] | None:
    """The order of all forms, () for the natural one; None if they differ, also if only some have a form."""
    orders = {form.order if form else () for form in forms}
    return orders.pop() if len(orders) == 1 else None


def common_block(forms: Iterable[BlockForm], most: int) -> int:
    """The largest block size, at most `most` (a power of two), into which blocks of all forms can be cut."""
    return math.gcd(most, *(form.block for form in forms))


def forms_in_key(forms: Mapping[str, BlockForm]) -> str:
    """Forms by name as a key component, with digests of their orders."""
    return json.dumps(
        {name: {**asdict(form), "order": _digest(form.order)} for name, form in forms.items()}, sort_keys=True
    )


def _digest(order: tuple[int, ...]) -> str:
    return hashlib.sha256(json.dumps(order).encode()).hexdigest() if order else ""
