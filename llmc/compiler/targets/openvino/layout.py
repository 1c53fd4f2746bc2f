"""Where a value of the graph language lies in an OpenVINO model, whose tokens are laid end to end.

A value [B, Q, …], [B, …, Q, …] or [B·Q, …] of the graph is [T, …] in the model, T being all tokens, and [B, …] after
`last_rows` is [R, …]: one axis comes first for the batch and its tokens, and the others follow in the graph's order. So
a transpose that moves tokens alone moves nothing. A value [n·B·Q, …], the heads of all tokens, is [T, n, …].
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from llmc.compiler.program.ir import Dim, Value
from llmc.errors import CompileError

BATCH, TOKENS = "B", "Q"


def token_axes(shape: Sequence[Dim]) -> tuple[int, ...]:
    """The axes that are one in the model; none of a value that has no tokens."""
    if not shape or (shape[0] != BATCH and not heads_apart(shape)):
        return ()
    found = [i for i, dim in enumerate(shape) if i and dim == TOKENS]
    return (0, *found[:1])


def heads_apart(shape: Sequence[Dim]) -> int:
    """n of a value [n·B·Q, …], as the tracer writes products: 1 where tokens have no heads; 0 of other values."""
    factors = sorted(str(shape[0]).split("*")) if shape else []
    numbers, symbols = factors[:-2], factors[-2:]
    return math.prod(map(int, numbers)) if symbols == [BATCH, TOKENS] and all(n.isdecimal() for n in numbers) else 0


def others(shape: Sequence[Dim], what: object) -> list[int]:
    """Sizes of the axes that follow, of a value [T, …], or all of one without tokens. Raises CompileError for one that
    is no number; `what` is named.
    """
    held = token_axes(shape)
    found = [dim for i, dim in enumerate(shape) if i not in held]
    if heads_apart(shape) > 1:
        found.insert(0, heads_apart(shape))
    if not all(isinstance(dim, int) for dim in found):
        raise CompileError(f"a size of {', '.join(map(str, shape))} has no OpenVINO lowering (at {what})")
    return [int(dim) for dim in found]


def axis_of(value: Value, axis: int, what: object) -> int:
    """The model's axis for an axis of the graph. Raises CompileError for one that tokens or rows are along."""
    axis %= len(value.shape)
    held = token_axes(value.shape)
    if axis in held:
        raise CompileError(f"an operator along batch or tokens has no OpenVINO lowering (at {what})")
    return bool(held) + (heads_apart(value.shape) > 1) + sum(i not in held for i in range(axis))


def order_of(source: Value, order: Sequence[int], what: object) -> list[int]:
    """The model's permutation for `order` of the graph's axes."""
    held = token_axes(source.shape)
    if heads_apart(source.shape) > 1:
        raise CompileError(f"a transposition of the heads of all tokens has no OpenVINO lowering (at {what})")
    moved = [axis_of(source, axis, what) for axis in order if axis % len(source.shape) not in held]
    return ([0] if held else []) + moved


def beside(value: Value, out: Value, what: object) -> list[int] | None:
    """The shape that lets an operand without tokens meet others of `out` in the model; None: as it is.

    Raises CompileError where an operand with tokens has them elsewhere than `out`.
    """
    held = token_axes(out.shape)
    if token_axes(value.shape):
        if len(value.shape) != len(out.shape) or token_axes(value.shape) != held:
            raise CompileError(f"{value} and {out} have tokens along other axes: no OpenVINO lowering (at {what})")
        return None
    padded = [1] * (len(out.shape) - len(value.shape)) + others(value.shape, what)
    if any(padded[i] != 1 for i in held):
        raise CompileError(f"{value} has sizes of its own for tokens: no OpenVINO lowering (at {what})")
    wanted = [size for i, size in enumerate(padded) if i not in held]
    given = list(value.shape)
    while len(wanted) > len(given) and wanted[0] == 1:
        wanted.pop(0)
    return None if wanted == given else wanted
