"""Which cards read weights in 8 bits inside the product, so that no copy in 16 bits is made of them.

Where Triton's emitter cannot read a format, XLA writes the whole matrix out in bf16 before each product: slower than
weights in bf16. Its rule for float8 e4m3 is "at least Hopper" (openxla/xla, xla/service/gpu/triton_support.cc), and
what jax 0.10.2 compiles agrees: from 9.0 on a product has no such copy, at 8.0 and 8.9 it has one. A cache in fp8 is
converted as attention reads it, by instructions or without them, on every card.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmc.compiler.targets.cuda.cards import Card

READ_FROM: Mapping[str, tuple[int, int]] = {"int8": (8, 0), "fp8": (9, 0)}
"""The least compute capability, by the format of the weights."""


def lacks_format(card: Card, flag: str, name: str) -> str:
    """See XlaFormats.lacks_format."""
    least = READ_FROM.get(name) if flag == "--quantize" else None
    if least is None or card.compute_capability >= least:
        return ""
    others = [other for other, needed in READ_FROM.items() if card.compute_capability >= needed] or ["none"]
    return (
        f"XLA reads such weights inside products from compute capability {least[0]}.{least[1]} on, {card.name} has "
        f"{card.capability}: it would write each matrix out in bf16 first; choose --quantize {' or '.join(others)}"
    )
