"""Lowers the fused graph to an OpenVINO model of one shape over contiguous caches, for devices without paged attention.

All sizes are static: B rows, Q new tokens of each, a cache of S tokens (0: none, the first step of a sequence). The
cache is read-only; new entries are outputs, which the owner of the cache writes. All plugins support the operators
used; between the attentions tokens are packed (graph_model.py).

    inputs   token_ids [B, Q], past_lengths [B], new_lengths [B] int32 (1 … Q live tokens, right padded); where S > 0
             past_k0, past_v0, past_k1 … [B, heads, S, width] float32, of which row b's first past_lengths[b] tokens are
             read and the others may hold anything, NaN included; where S > 0 or requested, recurrent states [B, …],
             with zeros in rows without a past; a layer with a ring buffer of R slots has min(S, R), in the order of
             runtime/cache_shape.py
    outputs  logits [B, V] float32 after each row's last live token; with top_k also top_values [B, k] float32,
             descending, and top_ids [B, k], integers; new_k0, new_v0 … [B, heads, Q, width] float32; recurrent states
             after each row's last live token, such as new_conv0 [B, …]

Row b's new token i has position past_lengths[b] + i, and sees earlier tokens within the layer's window. Layers with
recurrent state are matmuls (frontend/chunked.py), since such devices run loops slowly; `Arrays` has the
functions of numpy that these use. Their values that do not depend on the model stay numpy's, and become constants where
they meet one that does. Numbers are float32, counts int32.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

from llmc.compiler.frontend import chunked
from llmc.compiler.program.ir import Graph, Node, Value
from llmc.compiler.targets.openvino.formats import Constants, WeightFormat
from llmc.compiler.targets.openvino.graph_model import (
    GraphModel,
    TokenRows,
    caches_of,
    grows,
    kept_of,
    model_of,
    parameter,
)
from llmc.compiler.targets.openvino.plain import token_axes
from llmc.runtime.cache_shape import CacheShape

_TYPES = {"f32": np.float32, "i32": np.int32, "boolean": np.bool_}


def _operator(op: Callable[..., Any], turned: bool = False) -> Callable[[GraphArray, Any], GraphArray]:
    """A method of GraphArray for an operator with another value; `turned`: the other is the left side."""

    def method(self: GraphArray, other: Any) -> GraphArray:
        pair = self.node, self._arrays.node(self.dtype(other) if isinstance(other, int | float) else other)
        return GraphArray(self._arrays, op(*(pair[::-1] if turned else pair)))

    return method


def _matmul(a: Any, b: Any) -> Any:
    return ops.matmul(a, b, False, False)


class GraphArray:
    """A value of the model, with numpy's operators."""

    __array_ufunc__ = None  # makes numpy's arrays defer operators with one of these to it

    def __init__(self, arrays: Arrays, node: Any) -> None:
        self._arrays = arrays
        self.node = node.output(0) if hasattr(node, "output") else node
        self.shape = tuple(self.node.get_shape())
        self.ndim = len(self.shape)
        self.dtype = _TYPES[self.node.get_element_type().get_type_name()]

    __add__ = __radd__ = _operator(ops.add)
    __sub__, __rsub__ = _operator(ops.subtract), _operator(ops.subtract, turned=True)
    __mul__ = __rmul__ = _operator(ops.multiply)
    __truediv__, __rtruediv__ = _operator(ops.divide), _operator(ops.divide, turned=True)
    __matmul__, __rmatmul__ = _operator(_matmul), _operator(_matmul, turned=True)
    __gt__, __lt__ = _operator(ops.greater), _operator(ops.less)
    __eq__ = _operator(ops.equal)  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]

    def __neg__(self) -> GraphArray:
        return GraphArray(self._arrays, ops.negative(self.node))

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


STEP_INPUTS = ("token_ids", "past_lengths", "new_lengths")


class StaticModel(GraphModel):
    """Builds `model` from a fused `graph` for `batch` rows of `query` new tokens over a cache of `context` tokens.

    `states`: it takes recurrent states even without a context. `cache` has ring buffers; None: a slot for every token.
    Constants are declared in `weights.constants`. Raises CompileError naming an operator that has no form here.
    """

    def __init__(
        self, graph: Graph, weights: WeightFormat, batch: int, query: int, context: int, top_k: int = 0,
        states: bool = False, cache: CacheShape | None = None,
    ) -> None:  # fmt: skip
        super().__init__(graph, weights)
        self.sizes = batch, query, context
        held = caches_of(graph)
        self._rings = {} if cache is None else {v: t.ring for v, t in zip(held, cache, strict=True)}
        self._arrays = Arrays(self.constants)
        shapes = zip(STEP_INPUTS, ((batch, query), (batch,), (batch,)), strict=True)
        self._step = step = {name: parameter(name, shape, ov.Type.i32) for name, shape in shapes}
        self._rows: dict[int | None, Positions] = {}
        self._new: dict[Value, Any] = {}
        taken = [v for v in held if context or (states and not grows(v))]
        given = {v: parameter(v.name, self._sized(v), ov.Type.f32) for v in taken}
        self.caches += given.values()
        outputs = self.lower(self._laid_out(step), top_k, given)
        new = [(v.name.replace("past_", "new_", 1), self._new[v]) for v in held]
        self.model = model_of([*step.values(), *self.caches], [*outputs.items(), *new])

    def _laid_out(self, step: dict[str, Any]) -> dict[str, Any]:
        """The operators' inputs: B · Q packed tokens."""
        (batch, query, _), small = self.sizes, self.constants.small
        positions = ops.reshape(self._rows_over(None).of_tokens, small([batch * query]), False)
        angles = {v for node in self.graph.nodes if node.op == "gqa" for v in node.inputs[6:8] if v is not None}
        if angles:  # padding may be beyond the last position
            positions = ops.minimum(positions, small(min(int(v.shape[0]) for v in angles) - 1))
        begins = self.constants.table(f"begins_{batch}_{query}", np.arange(batch, dtype=np.int32) * query - 1)
        return {
            "input_ids": ops.reshape(step["token_ids"], small([batch * query]), False),
            "position_ids": positions,
            "rows": ops.add(step["new_lengths"], begins),
        }

    def _rows_over(self, ring: int | None) -> Positions:
        """Rows over ring buffers of so many slots, or over a slot for every token."""
        if ring is not None and ring >= self.sizes[2]:
            ring = None
        if ring not in self._rows:
            self._rows[ring] = Positions(self.constants, self._step["past_lengths"], self.sizes, ring)
        return self._rows[ring]

    def _sized(self, value: Value) -> list[int]:
        context, ring = self.sizes[2], self._rings.get(value)
        known = dict(zip("BQS", (*self.sizes[:2], context if ring is None else min(context, ring)), strict=True))
        return [known[dim[:1]] if isinstance(dim, str) else dim for dim in value.shape]

    def _op_gqa(self, node: Node) -> list[Any]:
        query, *new = self.qkv(node)
        past = [v for v in node.inputs[3:5] if v is not None]
        rows = self._rows_over(self._rings.get(past[0]))
        for v, x, (heads, size) in zip(past, new, kept_of(node), strict=True):
            if v not in self._new:  # some layers read the keys and values of earlier ones
                self._new[v] = rows.headed(x, heads, size)
        held = [self.get(v) for v in past] if self.sizes[2] else None
        return [self.attend(rows, node, query, [self._new[v] for v in past], held)]

    def _op_causal_conv(self, node: Node) -> list[Any]:
        return self._chunked(chunked.causal_conv, node, node.attrs["silu"])

    def _op_gated_delta(self, node: Node) -> list[Any]:
        return self._chunked(chunked.gated_delta, node, node.attrs["normalise"])

    def _op_state_scan(self, node: Node) -> list[Any]:
        return self._chunked(chunked.state_scan, node)

    def _chunked(self, function: Callable[..., Any], node: Node, *attrs: bool) -> list[Any]:
        """An operator whose last inputs are a state and the rows' lengths."""
        *given, state, _, _ = node.inputs
        assert state is not None
        held = self._array(state) if state in self._built else np.zeros(self._sized(state), np.float32)
        lengths = [GraphArray(self._arrays, self._step[name]) for name in STEP_INPUTS[1:]]
        out, after = function(self._arrays, *map(self._array, given), held, *lengths, *attrs)
        self._new[state] = after.node
        return [ops.reshape(out.node, self.constants.small([-1, *out.shape[2:]]), False)]

    def _array(self, value: Value | None) -> GraphArray | None:
        """The value with separate row and token axes."""
        if value is None:
            return None
        built = self.get(value)
        if token_axes(value.shape) == (0, 1):
            built = ops.reshape(built, self.constants.small(self._sized(value)), False)
        return GraphArray(self._arrays, built)

    def _op_last_rows(self, node: Node) -> Any:
        return self.get(node.inputs[0]) if self.sizes[1] == 1 else super()._op_last_rows(node)


class Positions(TokenRows):
    """Token positions and visibility, shared by all layers of a model."""

    def __init__(
        self, constants: Constants, past_lengths: Any, sizes: tuple[int, int, int], ring: int | None = None
    ) -> None:  # fmt: skip
        """`ring`: slots of cached tokens, fewer than the context; slot j has the last token with p mod `ring` = j."""
        super().__init__(constants)
        batch, query, context = sizes
        self._sizes = batch, query, context if ring is None else ring
        self.single = query == 1
        small = constants.small
        past = ops.reshape(past_lengths, small([batch, 1, 1, 1]), False)
        self.of_tokens = ops.add(past, self._table("new", np.arange(query).reshape(1, 1, query, 1)))
        """[B, 1, Q, 1]: positions of the new tokens."""
        self.of_keys = ops.convert(ops.reshape(self.of_tokens, small([batch, 1, 1, query]), False), ov.Type.f32)
        if not context:
            return
        at = self._table("offsets", np.arange(self._sizes[2]).reshape(1, 1, 1, -1))
        if ring is None:
            self._offsets, self._there = at, ops.less(at, past)
            offsets = ops.broadcast(ops.convert(at, ov.Type.f32), small([batch, 1, 1, context]))
        else:
            last = ops.subtract(past, small(1))
            self._offsets = ops.subtract(last, ops.floor_mod(ops.subtract(last, at), small(ring)))
            self._there = ops.greater_equal(self._offsets, small(0))
            offsets = ops.convert(self._offsets, ov.Type.f32)
        self.live = ops.reshape(self._there, small([batch, 1, self._sizes[2], 1]), False)
        self.of_keys = ops.concat([offsets, self.of_keys], -1)

    def shape(self, *sizes: int | str) -> Any:
        known = {"B": self._sizes[0], "Q": self._sizes[1]}
        return self.constants.small([known[size] if isinstance(size, str) else size for size in sizes])

    def parts(self, shares: Any) -> tuple[Any, Any]:
        small, (_, query, context) = self.constants.small, self._sizes
        of_past, of_new = ops.variadic_split(shares, small(-1), small([context, query])).outputs()
        return of_past, of_new

    def mask(self, window: int, groups: int) -> Any:
        """A constant where it does not depend on the past."""
        (batch, query, context), small = self._sizes, self.constants.small
        at = np.arange(query)
        ahead = at[:, None] - at
        new = (ahead >= 0) & (ahead < window) if window > 0 else ahead >= 0
        mask = ops.convert(
            self._table(f"causal_{window}", np.tile(new, (groups, 1)).reshape(1, 1, groups * query, query)),
            ov.Type.boolean,
        )
        if not context:
            return mask
        past = self._there
        if window > 0:
            first = ops.subtract(self.of_tokens, small(window))
            past = ops.logical_and(past, ops.greater(self._offsets, first))
            past = ops.tile(past, small([1, 1, groups, 1]))
        rows = groups * query
        past = ops.broadcast(past, small([batch, 1, rows, context]))
        return ops.concat([past, ops.broadcast(mask, small([batch, 1, rows, query]))], -1)

    def _table(self, name: str, values: NDArray[Any]) -> Any:
        shape = "x".join(map(str, values.shape))
        return self.constants.table(f"{name}_{shape}", values.astype(np.int32))
