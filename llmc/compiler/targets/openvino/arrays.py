"""Values of a fixed-size model as arrays, for code written over numpy's functions (frontend/recurrent).

`Arrays` has the functions used there. Values that do not depend on the model stay numpy's, and become constants where
they meet one that does. Numbers are float32, counts int32.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from openvino import opset13 as ops

from llmc.compiler.targets.openvino.constants import Constants

_TYPES = {"f32": np.float32, "i32": np.int32, "boolean": np.bool_}


class GraphArray:
    """A value of the model, with numpy's operators."""

    __array_ufunc__ = None  # makes numpy's arrays defer operators with one of these to it

    def __init__(self, arrays: Arrays, node: Any) -> None:
        self._arrays = arrays
        self.node = node.output(0) if hasattr(node, "output") else node
        self.shape = tuple(self.node.get_shape())
        self.ndim = len(self.shape)
        self.dtype = _TYPES[self.node.get_element_type().get_type_name()]

    def _with(self, op: Callable[..., Any], other: Any, turned: bool = False) -> GraphArray:
        pair = self.node, self._arrays.node(self.dtype(other) if isinstance(other, int | float) else other)
        return GraphArray(self._arrays, op(*(pair[::-1] if turned else pair)))

    def __add__(self, other: Any) -> GraphArray:
        return self._with(ops.add, other)

    def __radd__(self, other: Any) -> GraphArray:
        return self._with(ops.add, other)

    def __sub__(self, other: Any) -> GraphArray:
        return self._with(ops.subtract, other)

    def __rsub__(self, other: Any) -> GraphArray:
        return self._with(ops.subtract, other, turned=True)

    def __mul__(self, other: Any) -> GraphArray:
        return self._with(ops.multiply, other)

    def __rmul__(self, other: Any) -> GraphArray:
        return self._with(ops.multiply, other)

    def __truediv__(self, other: Any) -> GraphArray:
        return self._with(ops.divide, other)

    def __rtruediv__(self, other: Any) -> GraphArray:
        return self._with(ops.divide, other, turned=True)

    def __neg__(self) -> GraphArray:
        return GraphArray(self._arrays, ops.negative(self.node))

    def __gt__(self, other: Any) -> GraphArray:
        return self._with(ops.greater, other)

    def __lt__(self, other: Any) -> GraphArray:
        return self._with(ops.less, other)

    def __eq__(self, other: object) -> GraphArray:  # type: ignore[override]
        return self._with(ops.equal, other)

    __hash__ = None  # type: ignore[assignment]

    def __matmul__(self, other: Any) -> GraphArray:
        return self._with(_matmul, other)

    def __rmatmul__(self, other: Any) -> GraphArray:
        return self._with(_matmul, other, turned=True)

    def sum(self, axis: int) -> GraphArray:
        return GraphArray(self._arrays, ops.reduce_sum(self.node, self._arrays.small([axis % self.ndim]), False))

    def swapaxes(self, a: int, b: int) -> GraphArray:
        order = list(range(self.ndim))
        order[a], order[b] = order[b], order[a]
        return GraphArray(self._arrays, ops.transpose(self.node, self._arrays.small(order)))

    def reshape(self, *shape: int) -> GraphArray:
        return GraphArray(self._arrays, ops.reshape(self.node, self._arrays.small(shape), False))

    def __getitem__(self, index: Any) -> GraphArray:
        """Supports numbers, slices without steps, None and an ellipsis."""
        items = list(index) if isinstance(index, tuple) else [index]
        for at in [n for n, item in enumerate(items) if item is Ellipsis]:
            known = sum(item is not None for item in items) - 1
            items[at : at + 1] = [slice(None)] * (self.ndim - known)
        axis, shape, cuts = 0, list[int](), list[tuple[int, int, int]]()
        for item in items:
            if item is None:
                shape.append(1)
                continue
            size = self.shape[axis]
            start, end, _ = (slice(item % size, item % size + 1) if isinstance(item, int) else item).indices(size)
            if (start, end) != (0, size):
                cuts.append((axis, start, end))
            shape += [] if isinstance(item, int) else [end - start]
            axis += 1
        node, small = self.node, self._arrays.small
        if cuts:
            axes, starts, ends = (list(each) for each in zip(*cuts, strict=True))
            node = ops.slice(node, small(starts), small(ends), small([1] * len(cuts)), small(axes))
        built, shape = GraphArray(self._arrays, node), [*shape, *self.shape[axis:]]
        return built if built.shape == tuple(shape) else built.reshape(*shape)


class Arrays:
    """Functions over arrays of one model."""

    ones, zeros, eye = staticmethod(np.ones), staticmethod(np.zeros), staticmethod(np.eye)

    def __init__(self, constants: Constants) -> None:
        self._constants = constants
        self.small = constants.small

    def node(self, value: Any) -> Any:
        """Return the model's node of a value, a constant if it has none yet."""
        if isinstance(value, GraphArray):
            return value.node
        array = np.asarray(value)
        array = array.astype(np.float32 if array.dtype.kind == "f" else bool if array.dtype.kind == "b" else np.int32)
        if array.size == 1:
            return self.small(array, array.dtype.type)
        name = hashlib.sha256(f"{array.dtype} {array.shape}".encode() + array.tobytes()).hexdigest()
        return self._constants.table(f"array_{name[:16]}", array).output(0)

    def arange(self, count: int) -> Any:
        return np.arange(count, dtype=np.int32)

    def exp(self, x: GraphArray) -> GraphArray:
        return GraphArray(self, ops.exp(x.node))

    def sqrt(self, x: GraphArray) -> GraphArray:
        return GraphArray(self, ops.sqrt(x.node))

    def cumsum(self, x: GraphArray, axis: int) -> GraphArray:
        return GraphArray(self, ops.cum_sum(x.node, self.small(axis % x.ndim)))

    def tril(self, x: Any, k: int = 0) -> Any:
        if not isinstance(x, GraphArray):
            return np.tril(x, k)
        return self.where(np.tril(np.ones(x.shape[-2:]), k) > 0, x, 0.0)

    def where(self, condition: Any, a: Any, b: Any) -> GraphArray:
        return GraphArray(self, ops.select(self.node(condition), self.node(a), self.node(b)))

    def concatenate(self, parts: Sequence[Any], axis: int) -> GraphArray:
        nodes = [self.node(part) for part in parts]
        return GraphArray(self, nodes[0] if len(nodes) == 1 else ops.concat(nodes, axis))

    def broadcast_to(self, x: GraphArray, shape: Sequence[int]) -> GraphArray:
        return GraphArray(self, ops.broadcast(x.node, self.small(list(shape))))


def _matmul(a: Any, b: Any) -> Any:
    return ops.matmul(a, b, False, False)
