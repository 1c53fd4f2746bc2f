"""Slopes of ALiBi (Press et al., 2021): what each head adds to a score for each position of its key."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_DIGITS = 6
"""Exponents are multiples of 8 / heads, heads rounded up to a power of two: these many decimals hold 512 heads'."""


def slopes_of_heads(slopes: Sequence[float]) -> Tensor:
    """[Hq] float32, made by operators: a traced program holds no constants. Slopes are powers of two, whose exponents
    count up evenly in a few runs."""
    exponents = [round(math.log2(slope), _DIGITS) for slope in slopes]
    parts = [torch.exp2(torch.arange(count) * step + first) for first, step, count in _runs(exponents)]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _runs(values: Sequence[float]) -> Iterator[tuple[float, float, int]]:
    """(first, step, count) of evenly spaced values, in order."""
    start = 0
    while start < len(values):
        first = values[start]
        step = values[start + 1] - first if start + 1 < len(values) else 0.0
        end = start + 1
        while end < len(values) and math.isclose(values[end], first + step * (end - start), abs_tol=1e-9):
            end += 1
        yield first, step, end - start
        start = end
