"""Layers with recurrent state (frontend/recurrent/operators.py) in a paged model: OpenVINO operators over state tables.

A table holds one state a row. The step's input `state_rows` has two table rows for each of its rows: where its state is
read, and where the new one is written. The runtime gives rows without a past a row of zeros to read. The operators take
rows of any lengths and write the tables in place (openvino/op/paged_causal_conv1d.hpp, paged_gated_delta_net.hpp and
paged_selective_ssm.hpp of OpenVINO 2026.4). Its Python package lacks them, so they are written by name and read back.

No such operator exists where each column of a state decays at its own rate (Mamba's first form). There a loop takes
token after token in all rows at once, which must have one length, and new states are outputs.

`OneLength` arranges B rows of Q new tokens each, for operators that need rows of one length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from llmc.compiler.frontend.recurrent.chunked import NORM_EPS
from llmc.compiler.program.ir import Node, Value
from llmc.compiler.targets.openvino.attention import TokenRows
from llmc.compiler.targets.openvino.constants import Constants
from llmc.compiler.targets.openvino.graph_model import output_of
from llmc.compiler.targets.openvino.plain import Building
from llmc.errors import CompileError


class OneLength:
    """Rows of one length, whose sizes are the input `sizes` [3] int32: B, Q, and S, the token capacity of rows' blocks.

    The sizes are an input because OpenVINO 2026.4 exports a ShapeOf without its type, and reads it back with another
    one.
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


class OverBlocks(OneLength, TokenRows):
    """Rows of one length over a block cache [blocks, H, block, D].

    `past` [B] int32 counts each row's cached tokens; `tables` [B, M] int32 has each row's blocks, followed by any
    others.
    """

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
        self._offsets = ops.concat([of_past, of_new], -1)
        self._there = ops.concat([ops.less(at, start), ops.greater_equal(of_new, start)], -1)
        self.of_keys = ops.convert(self._offsets, ov.Type.f32)

    def parts(self, shares: Any) -> tuple[Any, Any]:
        small = self.constants.small
        ends = small([0]), self.context, small([np.iinfo(np.int32).max])
        of_past, of_new = (ops.slice(shares, *ends[i : i + 2], small([1]), small([3])) for i in range(2))
        return of_past, of_new

    def seen(self, window: int, groups: int) -> Any:
        """Live cached tokens, and tokens that are not ahead."""
        if (window, groups) not in self._masks:
            small = self.constants.small
            mask = ops.logical_and(self._there, ops.less_equal(self._offsets, self._of_tokens))
            if window > 0:
                first = ops.subtract(self._of_tokens, small(window))
                mask = ops.logical_and(mask, ops.greater(self._offsets, first))
            self._masks[window, groups] = ops.tile(mask, small([1, 1, groups, 1]))
        return self._masks[window, groups]

    def cached(self, cache: Any, heads: int, size: int) -> Any:
        """Gather [B, H, S, D] from a cache."""
        small = self.constants.small
        blocks = ops.transpose(ops.gather(cache, self._tables, small(0)), small([0, 2, 1, 3, 4]))
        return ops.reshape(blocks, self.shape("B", heads, -1, size), False)


class PagedBuilding(Building, Protocol):
    """A paged model under construction (paged.py)."""

    def state_table(self, layout: str, state: Value | None, shape: list[int]) -> Any:
        """Return the input for a state's table, `shape` in a row."""

    def step_of_states(self) -> list[Any]:
        """Return the step inputs that follow a table in OpenVINO's operators."""

    def rows_read(self) -> Any:
        """Return each row's row in a state table, [B]."""

    def rows_of_one_length(self) -> OneLength:
        """Return the step's rows as rows of one length."""

    def in_plain_operators(self, what: str, why: str) -> None:
        """Count a layer that needs rows of one length."""

    def give(self, state: Value, new: Any) -> None:
        """Add the output for a state that is not written in place."""


class _Own(ov.Op):  # type: ignore[misc, unused-ignore]
    """An OpenVINO operator with the name of its class, whose output is like its input `like`."""

    def __init__(self, inputs: Sequence[Any], like: int, attrs: Mapping[str, Any]) -> None:
        self._like, self._attrs = like, dict(attrs)
        super().__init__(self, [output_of(x) for x in inputs])

    def validate_and_infer_types(self) -> None:
        self.set_output_type(0, self.get_input_element_type(self._like), self.get_input_partial_shape(self._like))

    def visit_attributes(self, visitor: Any) -> bool:
        visitor.on_attributes(self._attrs)
        return True


class PagedCausalConv1D(_Own):
    """x [T, C], table [rows, C, K], weight [C, 1, K], bias [C] or [0], the step's inputs → [T, C]."""


class PagedGatedDeltaNet(_Own):
    """query, key [T, Hk, Dk], value [T, Hv, Dv], table [rows, Hv, Dv, Dk], decay, beta [T, Hv], the step's inputs →
    [T, Hv, Dv]."""


class PagedSelectiveSSM(_Own):
    """rate [H], step [T, H], write [T, G, N], x [T, H, P], read [T, G, N], table [rows, H, P, N], the step's inputs →
    [T, H, P]."""


def _causal_conv(to: PagedBuilding, node: Node) -> list[Any]:
    x, weight, bias, state = node.inputs[:4]
    assert weight is not None
    small, (channels, width) = to.constants.small, (int(n) for n in weight.shape)
    kernel = ops.reshape(to.get(weight), small([channels, 1, width]), False)
    added = small([], np.float32) if bias is None else to.get(bias)
    table = to.state_table("conv", state, [channels, width])
    built = PagedCausalConv1D([to.get(x), table, kernel, added, *to.step_of_states()], 0, {}).output(0)
    return [ops.swish(built, small(1, np.float32)).output(0) if node.attrs["silu"] else built]


def _gated_delta(to: PagedBuilding, node: Node) -> list[Any]:
    query, key, value, decay, beta, state = node.inputs[:6]
    assert state is not None
    heads, size, width = (int(n) for n in state.shape[1:])
    table = to.state_table("delta", state, [heads, width, size])
    given = [to.get(query), to.get(key), to.get(value), table, to.get(decay), to.get(beta), *to.step_of_states()]
    norm = {"q_l2_norm_eps": NORM_EPS, "k_l2_norm_eps": NORM_EPS}
    attrs = {"use_qk_l2norm": bool(node.attrs["normalise"]), **norm}
    return [PagedGatedDeltaNet(given, 2, attrs).output(0)]


def _state_scan(to: PagedBuilding, node: Node) -> list[Any]:
    x, step, rate, write, read, state = node.inputs[:6]
    assert rate is not None
    assert state is not None
    if len(rate.shape) > 1:
        return _columns(to, node)
    table = to.state_table("scan", state, [int(n) for n in state.shape[1:]])
    given = [to.get(rate), to.get(step), to.get(write), to.get(x), to.get(read), table, *to.step_of_states()]
    return [PagedSelectiveSSM(given, 3, {}).output(0)]


def _columns(to: PagedBuilding, node: Node) -> list[Any]:
    """Channels of one value each, with states [N, C]; the N columns decay by `rate` [C, N].

    The loop's body has no constants, because the weights file has none for it.
    """
    x, step, rate, write, read, state = node.inputs[:6]
    assert state is not None
    channels, width, columns = (int(n) for n in state.shape[1:])
    if width != 1 or write is None or write.shape[2] != 1:
        raise CompileError(f"a scan of columns over {state.shape} has no OpenVINO lowering (at {node.out})")
    to.in_plain_operators("states", "no OpenVINO operator decays each column at its own rate; a loop takes tokens")
    small, rows = to.constants.small, to.rows_of_one_length()

    def apart(value: Any, *sizes: int) -> Any:
        return ops.reshape(value, rows.shape("B", -1, *sizes), False)

    steps = apart(to.get(step), 1, channels)
    rates = ops.transpose(to.get(rate), small([1, 0]))
    given = [
        ops.exp(ops.multiply(steps, rates)), ops.multiply(apart(to.get(x), 1, channels), steps),
        apart(to.get(write), columns, 1), apart(to.get(read), 1, columns),
    ]  # fmt: skip
    table = to.state_table("columns", state, [columns, channels])
    held = ops.unsqueeze(ops.gather(table, to.rows_read(), small(0)), small([1]))
    shapes = [(columns, channels), (columns, channels), (1, channels), (columns, 1), (1, columns)]
    before, decay_factor, taken, written, requested = inner = [
        ops.parameter([-1, 1, *shape], ov.Type.f32) for shape in shapes
    ]
    after = ops.result(ops.add(ops.multiply(before, decay_factor), ops.multiply(taken, written)))
    token = ops.result(ops.matmul(requested, after.input_value(0), False, False))
    loop = ops.tensor_iterator()
    loop.set_body(ov.Model([after, token], inner, "token"))
    loop.set_merged_input(before, output_of(held), after.output(0))
    for parameter, values in zip(inner[1:], given, strict=True):
        loop.set_sliced_input(parameter, output_of(values), 0, 1, 1, -1, 1)
    last = loop.get_iter_value(after.output(0), -1)
    tokens = loop.get_concatenated_slices(token.output(0), 0, 1, 1, -1, 1)
    to.give(state, ops.squeeze(last, small([1])))
    return [ops.reshape(tokens, small([-1, channels, 1]), False)]


STATES: Mapping[str, Callable[[PagedBuilding, Node], list[Any]]] = {
    "causal_conv": _causal_conv, "gated_delta": _gated_delta, "state_scan": _state_scan,
}  # fmt: skip
"""Emitters by operator name in program/ir.py."""
