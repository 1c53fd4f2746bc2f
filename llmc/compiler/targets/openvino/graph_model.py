"""Lowers the fused graph to OpenVINO nodes with packed tokens, except for attention, which each form of model adds.

Where the graph has [B, Q, …] the model has [T, …], T being all new tokens of the step; where it has [B, …] after
`last_rows` it has [R, …], one for each requested row of logits. Rotary embedding and RMS norm are written in the forms
that OpenVINO's plugins fuse. `attend` is attention in operators that every plugin has, over B rows of Q new tokens
and a cache of S tokens each. `TokenRows` may have these sizes static or dynamic.

Adapters that requests choose use the fewest nodes, where one format holds W and B (floats, and 8 bits in groups that
end where W's columns do). On a CPU, starting each matmul takes time in a step of few rows:

    y = W x + bias + B (mask ⊙ A x) = [W B] [x; mask ⊙ A x] + bias
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from openvino import opset15

from llmc.compiler.program.ir import Graph, Matcher, Node, Value
from llmc.compiler.targets.openvino.formats import Constants, WeightFormat
from llmc.compiler.targets.openvino.plain import PLAIN, Building, shape_of
from llmc.compiler.weights.recipes import BESIDE
from llmc.errors import CompileError

_INT32_MAX = 2**31 - 1


UNSEEN = -65504.0
"""Score of an invisible token: float16's least number, for devices that compute in float16."""


class TokenRows(ABC):
    """The rows of a step, and their token visibility."""

    single: bool
    """Whether Q is known to be 1."""
    live: Any
    """[B, 1, S, 1]: whether the cache slot holds a token. Only with a cache, as `parts`."""
    of_keys: Any
    """[B, 1, 1, S + Q] float32: positions of the cached and the new tokens."""

    def __init__(self, constants: Constants) -> None:
        self.constants = constants
        self._masks: dict[tuple[int, int], Any] = {}

    @abstractmethod
    def shape(self, *sizes: int | str) -> Any:
        """Return a shape of numbers, "B" and "Q"; -1 is the remaining size."""

    @abstractmethod
    def parts(self, shares: Any) -> tuple[Any, Any]:
        """Split [..., S + Q] into [..., S] and [..., Q]."""

    @abstractmethod
    def mask(self, window: int, groups: int) -> Any:
        """[B, 1, groups · Q, S + Q], or its broadcast: whether a new token sees each cached and new token.

        `window`: a token sees so many, itself included; not positive: all before it.
        """

    def seen(self, window: int, groups: int) -> Any:
        """Return `mask`, which layers share."""
        if (window, groups) not in self._masks:
            self._masks[window, groups] = self.mask(window, groups)
        return self._masks[window, groups]

    def headed(self, x: Any, heads: int, size: int) -> Any:
        """[B · Q, H · D] → [B, H, Q, D]."""
        if self.single:
            return ops.reshape(x, self.shape("B", heads, 1, size), False)
        apart = ops.reshape(x, self.shape("B", -1, heads, size), False)
        return ops.transpose(apart, self.constants.small([0, 2, 1, 3]))

    def by_row(self, by_head: Any, kv_heads: int, groups: int) -> Any:
        """[1, Hkv, groups, 1] → [B, Hkv, groups · Q, 1], the layout of scores."""
        each = ops.broadcast(by_head, self.shape("B", kv_heads, groups, "Q"))
        return ops.reshape(each, self.shape("B", kv_heads, -1, 1), False)


class GraphModel(Building):
    """Base of the model forms; a form defines `_op_gqa`, and adds its cache inputs to `caches`."""

    def __init__(self, graph: Graph, weights: WeightFormat) -> None:
        super().__init__(graph, weights)
        self.caches: list[Any] = []
        self._rotary: dict[Value, Any] = {}
        self._masks: dict[tuple[Value, str], Any] = {}
        self._widened: Mapping[Node, Node] = {}

    def lower(self, inputs: Mapping[str, Any], top_k: int, there: Mapping[Value, Any] | None = None) -> dict[str, Any]:
        """Build nodes for the whole graph: "logits"; with `top_k` also "top_values" and "top_ids".

        `inputs` are nodes of all tokens, input_ids and position_ids [T], `rows` [R], the tokens whose logits are
        wanted, and any further inputs of the form; `there` are values of the graph that exist already. Raises
        CompileError naming an operator that has no form here.
        """
        self.emit(inputs, there or {})
        logits = output_of(self.get(self.graph.outputs[0][1]))
        return {"logits": logits} | (self._top(logits, top_k) if top_k else {})

    def emit(self, inputs: Mapping[str, Any], there: Mapping[Value, Any]) -> None:
        """Build the graph's values except for `there`; `inputs` are those of `lower`. Raises CompileError."""
        self.inputs = inputs
        self._built.update(there)
        self._widened = self._find_widened()
        for node in self.graph.nodes:
            if node in self._widened.values():
                continue
            if own := getattr(self, f"_op_{node.op}", None):
                built = own(node)
            elif plain := PLAIN.get(node.op):
                built = plain(self, node)
            else:
                raise CompileError(f"operator {node.op!r} has no OpenVINO lowering (at {node.out})")
            for value, output in zip(node.outputs, built if isinstance(built, list) else [built], strict=False):
                self._built[value] = output

    def qkv(self, node: Node) -> tuple[Any, Any, Any]:
        """Return query, key and value [T, H · D] of an attention, separately and with rotary embedding."""
        q, k, v, _, _, _, cos, sin, *_ = node.inputs
        heads, kv_heads, size = heads_of(node)
        if k is None:
            widths = [heads * size, kv_heads * size, kv_heads * value_width(node)]
            query, key, value = self._split(self.get(q), widths)
        else:
            query, key, value = (self.get(x) for x in (q, k, v))
        if cos is not None and sin is not None:
            query, key = (self._turned(x, n, size, cos, sin) for x, n in ((query, heads), (key, kv_heads)))
        return query, key, value

    def sinks(self, node: Node) -> Any:
        given = node.optional(8)
        return None if given is None else self.get(given)

    def _turned(self, x: Any, heads: int, size: int, cos: Value, sin: Value) -> Any:
        """Rotary embedding of [T, H·D]: rotates the halves of each head's first values."""
        small, width = self.constants.small, 2 * int(cos.shape[1])
        x = ops.transpose(ops.reshape(x, small([-1, 1, heads, size]), False), small([0, 2, 1, 3]))
        rest = []
        if width < size:
            x, *rest = ops.variadic_split(x, small(3), small([width, size - width])).outputs()
        low = ops.slice(x, small([0]), small([width // 2]), small([1]), small([3]))
        high = ops.slice(x, small([width // 2]), small([_INT32_MAX]), small([1]), small([3]))
        turned = ops.concat([ops.multiply(high, small(-1, np.float32)), low], -1)
        x = ops.add(ops.multiply(x, self._angles(cos, width)), ops.multiply(turned, self._angles(sin, width)))
        if rest:
            x = ops.concat([x, *rest], -1)
        return ops.reshape(ops.transpose(x, small([0, 2, 1, 3])), small([-1, heads * size]), False)

    def _angles(self, table: Value, size: int) -> Any:
        """cos or sin of each token's position, [T, 1, 1, D], from a table [P, D/2]."""
        if table not in self._rotary:
            small = self.constants.small
            half = ops.gather(self.get(table), self.inputs["position_ids"], small(0))
            self._rotary[table] = ops.reshape(ops.concat([half, half], -1), small([-1, 1, 1, size]), False)
        return self._rotary[table]

    def _op_embedding(self, node: Node) -> Any:
        weight, ids = node.given
        matrix = self.weights.matrix([self.graph.weights[weight]], [shape_of(weight)])
        at = self._built[ids] if ids in self._built else self.inputs["input_ids"]
        return ops.gather(matrix, at, self.constants.small(0))

    def _op_linear(self, node: Node) -> Any:
        count = len(node.attrs.get("parts", [0]))
        return self._matmul(self.get(node.inputs[0]), node.inputs[1 : 1 + count], node.inputs[1 + count :])

    def _op_adapted(self, node: Node) -> Any:
        """An adapter's sum, or the matmul that includes B's columns."""
        base, x, adapters = node.given[:3]
        low, high, matmul = node.value(3), node.inputs[4:], self._widened.get(node)
        mask = self._mask(adapters, int(low.shape[0]), node.attrs["ends"])
        chosen = ops.multiply(self._matmul(self.get(x), [low]), mask)
        if matmul is None:
            return ops.add(self.get(base), self._matmul(chosen, high))
        matrices, biases = matmul.inputs[1 : 1 + len(high)], matmul.inputs[1 + len(high) :]
        return self._matmul(ops.concat([self.get(x), chosen], -1), matrices, biases, beside=high)

    def _mask(self, adapters: Value, ranks: int, ends: list[int]) -> Any:
        """1 at the ranks of each token's adapter, [T, R]."""
        name = f"ranks_{ranks}_{'_'.join(map(str, ends))}"
        if (adapters, name) not in self._masks:
            table = np.zeros((len(ends), ranks), np.float32)
            for number, (begin, end) in enumerate(pairwise(ends), 1):
                table[number, begin:end] = 1
            chosen = ops.gather(self.constants.table(name, table), self.get(adapters), self.constants.small(0))
            self._masks[adapters, name] = chosen
        return self._masks[adapters, name]

    def _find_widened(self) -> dict[Node, Node]:
        """`adapted` nodes whose matmul includes B's columns, each with that matmul's node."""
        m, found = Matcher(self.graph), {}
        for node in self.graph.nodes:
            if node.op == "adapted":
                base, low, high = node.inputs[0], node.value(3), node.inputs[4:]
                matmul = m.built_by(base, "linear") if base is not None and m.sole(base) else None
                if matmul is None or matmul.inputs[0] is not node.inputs[1]:
                    continue
                matrices, (rows, width) = matmul.inputs[1 : 1 + len(high)], shape_of(low)
                if [_rows(v) for v in matrices] == [_rows(v) for v in high] and self.weights.holds_beside(width, rows):
                    found[node] = matmul
        return found

    def _matmul(
        self, x: Any, matrices: Sequence[Value | None], biases: Sequence[Value | None] = (),
        beside: Sequence[Value | None] = (),
    ) -> Any:  # fmt: skip
        """x · concat(matrices)ᵀ + concat(biases), with the columns of one of `beside` appended to each matrix."""
        sources, shapes = self._held(matrices)
        if beside:
            more, columns = self._held(beside)
            sources = [BESIDE.join(pair) for pair in zip(sources, more, strict=True)]
            shapes = [(rows, width + wide[1]) for (rows, width), wide in zip(shapes, columns, strict=True)]
        x = self.weights.inputs(x, sources, shapes[0][1])
        out = ops.matmul(x, self.weights.matrix(sources, shapes, reordered=True), False, True)
        return ops.add(out, self.weights.concatenated(*self._held(biases))) if biases else out

    def _held(self, values: Sequence[Value | None]) -> tuple[list[str], list[tuple[int, ...]]]:
        there = [v for v in values if v is not None]
        return [self.graph.weights[v] for v in there], [shape_of(v) for v in there]

    def _op_rms_norm(self, node: Node) -> Any:
        return self._norm(self.get(node.inputs[0]), node.inputs[1], node.attrs["eps"])

    def _op_skip_rms_norm(self, node: Node) -> list[Any]:
        total = ops.add(self.get(node.inputs[0]), self.get(node.inputs[1]))
        return [self._norm(total, node.inputs[2], node.attrs["eps"]), total]

    def _norm(self, x: Any, weight: Value | None, eps: float) -> Any:
        small = self.constants.small
        mean = ops.reduce_mean(ops.power(x, small(2, np.float32)), small([-1]), True)
        root = ops.divide(small(1, np.float32), ops.sqrt(ops.add(mean, small(eps, np.float32))))
        return ops.multiply(self.get(weight), ops.multiply(x, root))

    def _split(self, x: Any, parts: list[int]) -> list[Any]:
        small = self.constants.small
        return list(ops.variadic_split(x, small(-1), small(parts)).outputs())

    def _op_last_rows(self, node: Node) -> Any:
        return ops.gather(self.get(node.inputs[0]), self.inputs["rows"], self.constants.small(0))

    def _top(self, logits: Any, k: int) -> dict[str, Any]:
        """The k largest logits, descending, and their ids; `stable` puts the lower id first for equal values."""
        top = opset15.topk(
            logits, self.constants.small(k), -1, "max", "value", index_element_type="i64", stable=True
        )  # fmt: skip
        return {"top_values": top.output(0), "top_ids": top.output(1)}

    def attend(self, rows: TokenRows, node: Node, query: Any, new: Sequence[Any], past: Sequence[Any] | None) -> Any:
        """[B · Q, Hq · Dv] of query [B · Q, Hq · D], new keys and values [B, H, Q, D] and cached ones [B, H, S, D].

        Unused cache slots may hold anything, NaN included. A group's query heads are rows of one matmul with its key.
        """
        small, (heads, kv_heads, size), width = self.constants.small, heads_of(node), value_width(node)
        groups, softcap = heads // kv_heads, float(node.attrs["softcap"])
        grouped = ops.reshape(rows.headed(query, heads, size), rows.shape("B", kv_heads, -1, size), False)
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
            by_head = rows.by_row(small(np.reshape(slopes, (1, kv_heads, groups, 1)), np.float32), kv_heads, groups)
            scores = ops.add(scores, ops.multiply(by_head, rows.of_keys))
        if (table := node.optional(9)) is not None:
            scores = self._with_offsets(rows, scores, table, (kv_heads, groups))
        scores = ops.select(rows.seen(int(node.attrs["window"]), groups), scores, small(UNSEEN, np.float32))
        shares = self._shares(rows, scores, node)
        if past_value is None:
            out = ops.matmul(shares, new[1], False, False)
        else:
            of_past, of_new = rows.parts(shares)
            out = ops.add(ops.matmul(of_past, past_value, False, False), ops.matmul(of_new, new[1], False, False))
        if not rows.single:
            out = ops.transpose(ops.reshape(out, rows.shape("B", heads, -1, width), False), small([0, 2, 1, 3]))
        return ops.reshape(out, small([-1, heads * width]), False)

    def _shares(self, rows: TokenRows, scores: Any, node: Node) -> Any:
        """Softmax of scores [B, Hkv, groups · Q, S + Q], including each head's sink."""
        sinks = self.sinks(node)
        if sinks is None:
            return ops.softmax(scores, -1)
        small, (heads, kv_heads, _) = self.constants.small, heads_of(node)
        groups = heads // kv_heads
        sinks = rows.by_row(ops.reshape(sinks, small([1, kv_heads, groups, 1]), False), kv_heads, groups)
        shares = ops.softmax(ops.concat([scores, sinks], -1), -1)
        return ops.slice(shares, small([0]), small([-1]), small([1]), small([3]))

    def _with_offsets(self, rows: TokenRows, scores: Any, table: Value, heads: tuple[int, int]) -> Any:
        """Scores [B, Hkv, groups · Q, S + Q] plus each head's bias by key offset, from a table [Hq, offsets]."""
        small = self.constants.small
        at = ops.squeeze(ops.minimum(rows.of_keys, small(int(table.shape[1]) - 1, np.float32)), small([1, 2]))
        added = ops.transpose(
            ops.gather(self.get(table), ops.convert(at, np.int32), small(1)), small([1, 0, 2])
        )  # [B, Hq, S + Q]
        apart = ops.reshape(scores, rows.shape("B", *heads, "Q", -1), False)
        built = ops.add(apart, ops.unsqueeze(ops.reshape(added, rows.shape("B", *heads, -1), False), small(3)))
        return ops.reshape(built, ops.shape_of(scores), False)


def caches_of(graph: Graph) -> list[Value]:
    """Return the graph's cache inputs in the order of the cache's shape: keys and values, and recurrent states."""
    return [v for name, v in graph.inputs.items() if name.startswith("past_") and name != "past_lengths"]


def grows(cache: Value) -> bool:
    """Whether a cache is keys or values, whose third size is the context, and not a recurrent state."""
    return any(isinstance(size, str) for size in cache.shape[1:])


def heads_of(node: Node) -> tuple[int, int, int]:
    """Return query heads, key/value heads, and head size."""
    heads, kv_heads, size = (int(node.attrs[name]) for name in ("heads", "kv_heads", "head_dim"))
    return heads, kv_heads, size


def value_width(node: Node) -> int:
    """Return the head size of values, which may differ from that of keys."""
    return int(node.attrs.get("value_dim", node.attrs["head_dim"]))


def kept_of(node: Node) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return heads and width of keys and of values."""
    _, kv_heads, size = heads_of(node)
    return (kv_heads, size), (kv_heads, value_width(node))


def parameter(name: str, shape: Sequence[int], dtype: Any) -> Any:
    """Create an input of the model; a size of -1 is dynamic."""
    built = ops.parameter(list(shape), dtype, name=name)
    built.output(0).set_names({name})
    return built


def model_of(inputs: Iterable[Any], outputs: Iterable[tuple[str, Any]]) -> ov.Model:
    """Create the model with `outputs` by name.

    Outputs that are the same value, or an input, get an operator of their own, because a tensor has one name.
    """
    results = []
    for name, value in outputs:
        result = ops.result(value)
        result.set_friendly_name(name)
        result.output(0).set_names({name})
        results.append(result)
    return ov.Model(results, list(inputs), "llmc")


def output_of(node: Any) -> Any:
    """Return a node's first output; an output itself."""
    return node.output(0) if hasattr(node, "output") else node


def _rows(value: Value | None) -> int:
    return 0 if value is None else int(value.shape[0])
