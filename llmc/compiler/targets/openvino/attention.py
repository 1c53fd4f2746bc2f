"""Attention in operators that every plugin has, over cached and new tokens of rows of one length.

Sizes are B rows, Q new tokens of each, and a cache of S tokens of each; `TokenRows` may have them static or dynamic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from openvino import opset13 as ops

from llmc.compiler.program.ir import Node
from llmc.compiler.targets.openvino.graph_model import GraphModel, heads_of, value_width

UNSEEN = -65504.0
"""Score of an invisible token: float16's least number, for devices that compute in float16."""


class TokenRows(Protocol):
    """The rows of a step, and their token visibility."""

    single: bool
    """Whether Q is known to be 1."""
    live: Any
    """[B, 1, S, 1]: whether the cache slot holds a token. Only with a cache, as `parts`."""
    of_keys: Any
    """[B, 1, 1, S + Q] float32: positions of the cached and the new tokens."""

    def shape(self, *sizes: int | str) -> Any:
        """Return a shape of numbers, "B" and "Q"; -1 is the remaining size."""

    def seen(self, window: int, groups: int) -> Any:
        """[B, 1, groups · Q, S + Q], or its broadcast: whether a new token sees each cached and new token.

        `window`: a token sees so many, itself included; not positive: all before it.
        """

    def parts(self, shares: Any) -> tuple[Any, Any]:
        """Split [..., S + Q] into [..., S] and [..., Q]."""


def headed(to: GraphModel, rows: TokenRows, x: Any, heads: int, size: int) -> Any:
    """[B · Q, H · D] → [B, H, Q, D]."""
    if rows.single:
        return ops.reshape(x, rows.shape("B", heads, 1, size), False)
    return ops.transpose(ops.reshape(x, rows.shape("B", -1, heads, size), False), to.constants.small([0, 2, 1, 3]))


def attended(
    to: GraphModel, rows: TokenRows, node: Node, query: Any, new: Sequence[Any], past: Sequence[Any] | None
) -> Any:
    """[B · Q, Hq · Dv] of query [B · Q, Hq · D], new keys and values [B, H, Q, D] and cached ones [B, H, S, D].

    Unused cache slots may hold anything, NaN included. The query heads of a group are rows of one matmul with their key
    head.
    """
    small, (heads, kv_heads, size), width = to.constants.small, heads_of(node), value_width(node)
    groups, softcap = heads // kv_heads, float(node.attrs["softcap"])
    grouped = ops.reshape(headed(to, rows, query, heads, size), rows.shape("B", kv_heads, -1, size), False)
    grouped = ops.multiply(grouped, small(node.attrs["scale"], np.float32))
    scores = ops.matmul(grouped, new[0], False, True)
    past_value = None
    if past is not None:
        past_value = ops.select(rows.live, past[1], small(0, np.float32))  # 0 · NaN is NaN
        scores = ops.concat([ops.matmul(grouped, past[0], False, True), scores], -1)
    if softcap:
        cap = small(softcap, np.float32)
        scores = ops.multiply(ops.tanh(ops.divide(scores, cap)), cap)
    if slopes := node.attrs.get("slopes"):
        by_head = _by_row(rows, small(np.reshape(slopes, (1, kv_heads, groups, 1)), np.float32), kv_heads, groups)
        scores = ops.add(scores, ops.multiply(by_head, rows.of_keys))
    if (table := node.optional(9)) is not None:
        scores = _with_offsets(rows, scores, to.get(table), int(table.shape[1]), (kv_heads, groups), small)
    scores = ops.select(rows.seen(int(node.attrs["window"]), groups), scores, small(UNSEEN, np.float32))
    shares = _shares(to, rows, scores, node)
    if past_value is None:
        out = ops.matmul(shares, new[1], False, False)
    else:
        of_past, of_new = rows.parts(shares)
        out = ops.add(ops.matmul(of_past, past_value, False, False), ops.matmul(of_new, new[1], False, False))
    if not rows.single:
        out = ops.transpose(ops.reshape(out, rows.shape("B", heads, -1, width), False), small([0, 2, 1, 3]))
    return ops.reshape(out, small([-1, heads * width]), False)


def _shares(to: GraphModel, rows: TokenRows, scores: Any, node: Node) -> Any:
    """Softmax of scores [B, Hkv, groups · Q, S + Q], including each head's sink."""
    sinks = to.sinks(node)
    if sinks is None:
        return ops.softmax(scores, -1)
    small, (heads, kv_heads, _) = to.constants.small, heads_of(node)
    groups = heads // kv_heads
    sinks = _by_row(rows, ops.reshape(sinks, small([1, kv_heads, groups, 1]), False), kv_heads, groups)
    shares = ops.softmax(ops.concat([scores, sinks], -1), -1)
    return ops.slice(shares, small([0]), small([-1]), small([1]), small([3]))


def _with_offsets(
    rows: TokenRows, scores: Any, table: Any, offsets: int, heads: tuple[int, int], small: Callable[..., Any]
) -> Any:  # fmt: skip
    """Scores [B, Hkv, groups · Q, S + Q] plus each head's bias by key offset, from a table [Hq, offsets]."""
    at = ops.squeeze(ops.minimum(rows.of_keys, small(offsets - 1, np.float32)), small([1, 2]))
    added = ops.transpose(ops.gather(table, ops.convert(at, np.int32), small(1)), small([1, 0, 2]))  # [B, Hq, S + Q]
    apart = ops.reshape(scores, rows.shape("B", *heads, "Q", -1), False)
    built = ops.add(apart, ops.unsqueeze(ops.reshape(added, rows.shape("B", *heads, -1), False), small(3)))
    return ops.reshape(built, ops.shape_of(scores), False)


def _by_row(rows: TokenRows, by_head: Any, kv_heads: int, groups: int) -> Any:
    """[1, Hkv, groups, 1] → [B, Hkv, groups · Q, 1], the layout of scores."""
    each = ops.broadcast(by_head, rows.shape("B", kv_heads, groups, "Q"))
    return ops.reshape(each, rows.shape("B", kv_heads, -1, 1), False)
