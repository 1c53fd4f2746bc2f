"""Rows of one length in a paged model, for what takes no rows of any lengths: B rows of Q new tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from llmc.compiler.targets.openvino.attention import Rows
from llmc.compiler.targets.openvino.constants import Constants


class OneLength:
    """The sizes of a step are an input, `sizes` [3] int32: B, Q, and S, the tokens that rows' blocks have room for.

    OpenVINO 2026.4 does not say the type of a ShapeOf in what it exports, and reads another.
    """

    single = False

    def __init__(self, constants: Constants, sizes: Any) -> None:
        self.constants = constants
        self.batch, self.query, self.context = ops.split(sizes, constants.small(0), 3).outputs()

    def shape(self, *sizes: int | str) -> Any:
        """B and Q are known when a step runs."""
        known, small = {"B": self.batch, "Q": self.query}, self.constants.small
        return ops.concat([known[size] if isinstance(size, str) else small([size]) for size in sizes], 0)

    def _range(self, size: Any) -> Any:
        small = self.constants.small
        return ops.range(small(0), ops.squeeze(size, small([0])), small(1), "i32")


class OverBlocks(OneLength, Rows):
    """The same rows, `past` [B] int32 tokens of each in a cache in blocks, [blocks, H, block, D]: `tables` [B, M] int32
    has the blocks of each row, and any others behind them."""

    def __init__(self, constants: Constants, sizes: Any, past: Any, tables: Any) -> None:
        super().__init__(constants, sizes)
        self._tables = tables
        self._masks: dict[tuple[int, int], Any] = {}
        small = constants.small
        start = ops.reshape(past, small([-1, 1, 1, 1]), False)
        at = ops.reshape(self._range(self.context), small([1, 1, 1, -1]), False)
        new = self._range(self.query)
        self.live = ops.less(ops.reshape(at, small([1, 1, -1, 1]), False), start)
        self._of_tokens = ops.add(start, ops.reshape(new, small([1, 1, -1, 1]), False))
        of_new = ops.add(start, ops.reshape(new, small([1, 1, 1, -1]), False))
        of_past = ops.broadcast(at, ops.concat([self.batch, small([1, 1]), self.context], 0))
        self._places = ops.concat([of_past, of_new], -1)
        self._there = ops.concat([ops.less(at, start), ops.greater_equal(of_new, start)], -1)
        self.of_keys = ops.convert(self._places, ov.Type.f32)

    def parts(self, shares: Any) -> tuple[Any, Any]:
        """Behind each other."""
        small = self.constants.small
        ends = small([0]), self.context, small([np.iinfo(np.int32).max])
        of_past, of_new = (ops.slice(shares, *ends[i : i + 2], small([1]), small([3])) for i in range(2))
        return of_past, of_new

    def seen(self, window: int, groups: int) -> Any:
        """Of the cache what is live, of all what is not ahead."""
        if (window, groups) not in self._masks:
            small = self.constants.small
            mask = ops.logical_and(self._there, ops.less_equal(self._places, self._of_tokens))
            if window > 0:
                first = ops.subtract(self._of_tokens, small(window))
                mask = ops.logical_and(mask, ops.greater(self._places, first))
            self._masks[window, groups] = ops.tile(mask, small([1, 1, groups, 1]))
        return self._masks[window, groups]

    def cached(self, cache: Any, heads: int, size: int) -> Any:
        """[B, H, S, D] of a cache."""
        small = self.constants.small
        blocks = ops.transpose(ops.gather(cache, self._tables, small(0)), small([0, 2, 1, 3, 4]))
        return ops.reshape(blocks, self.shape("B", heads, -1, size), False)
