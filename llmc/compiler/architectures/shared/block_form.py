"""The form of a matrix that a checkpoint stores in blocks: what targets decide by, before any block is read."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Literal

LEAST_BLOCK = 16
"""Weights that share a scale, at the least, in the products of ONNX Runtime and OpenVINO; a block is a multiple."""


@dataclass(frozen=True)
class BlockForm:
    """A matrix [N, K] of codes of `bits` (4 or 8), of which `block` neighbours along K share a scale."""

    type: str
    """Its name in the source: "Q4_1", "gptq"."""
    bits: int
    block: int
    offsets: Literal["", "zeros", "minimums"]
    """What each block has of its own beside its scale: a whole zero point, a minimum, or "" for neither: then the zero
    point is 2 ** (bits - 1)."""
    scales: str = "float16"
    """The dtype that holds each scale: float16, bfloat16 or float32."""
    stored_bits: int = 0
    """Of a code in the source, where that is fewer than `bits`; 0 where it is not."""
    order: tuple[int, ...] = ()
    """The input of each code along K, where neighbours share a scale in this order alone; () for their own order."""
    table: Literal["", "iq4", "float4"] = ""
    """Each code, of 8 bits, is 128 and a value of a table of 16, which 4 bits hold where a device looks values up: of
    IQ4_NL's (iq4), or of twice those of float4 e2m1."""
    turned: bool = False
    """Of experts [E, K, N]: blocks are of each matrix turned, [E · N, K]."""


def common_order(forms: Iterable[BlockForm | None]) -> tuple[int, ...] | None:
    """The order that all have, () for their own; None where they differ, and so where one of several has no form."""
    orders = {form.order if form else () for form in forms}
    return orders.pop() if len(orders) == 1 else None


def common_block(forms: Iterable[BlockForm], most: int) -> int:
    """The size in which blocks of all forms can be cut, none larger than `most`, a power of two."""
    return math.gcd(most, *(form.block for form in forms))


def forms_in_key(forms: Mapping[str, BlockForm]) -> str:
    """Forms by name, as the component of a key; orders by their digest."""
    return json.dumps(
        {name: {**asdict(form), "order": _digest(form.order)} for name, form in forms.items()}, sort_keys=True
    )


def _digest(order: tuple[int, ...]) -> str:
    return hashlib.sha256(json.dumps(order).encode()).hexdigest() if order else ""
