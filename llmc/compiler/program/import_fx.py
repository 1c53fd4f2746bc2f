"""Translate a traced program (torch.export) into the graph language.

Operators without a meaning for a compiler are dropped: assertions, no-op casts, views and slices, gradient-mode
wrappers. Tensors that depend only on a token's position (rotary cosines and sines) become tables over positions 0 …
max_positions − 1. Running the traced operators computes them, which keeps every scaling rule of a model (linear,
llama3, yarn …) without naming it here.

In a traced model without a cache (frontend/encode.py) every operator stays, including those of positions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import sympy
import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from llmc.compiler.checkpoint.adapter_layout import ADAPTERS, AdapterLayout
from llmc.compiler.program.ir import Dim, Graph, Node, Value
from llmc.errors import CompileError
from llmc.runtime.cache_shape import CacheShape
from llmc.runtime.executors.base import LENGTHS, TOKEN_IDS, TYPE_IDS

_IDENTITY = {"detach", "alias", "clone", "contiguous", "dropout", "lift_fresh_copy"}
_INT64_MAX = 2**63 - 1
_NUMBER = re.compile(r"_\d+$")


def import_program(
    program: ExportedProgram, max_positions: int, cache: CacheShape | None = None, adapters: AdapterLayout | None = None
) -> Graph:  # fmt: skip
    """Translate `program`, a step over `cache` (None: a key and a value per layer), with selectable `adapters`. Raises
    CompileError naming the operator and layer it cannot translate."""
    return Importer(program, max_positions, cache, adapters).run()


class Importer:
    """One translation of a step over a cache; `_EncoderImporter` overrides it for models without one."""

    axes: ClassVar[Mapping[str, str]] = {"token_ids": "BQ", "past_lengths": "B", "new_lengths": "B"}
    """Symbols of the inputs' sizes. All others are caches, of B rows and S slots, or S6 where a window of 6 may use a
    ring buffer."""

    def __init__(
        self, program: ExportedProgram, max_positions: int, cache: CacheShape | None,
        adapters: AdapterLayout | None = None,
    ) -> None:  # fmt: skip
        self.adapters = adapters
        self.fixed = self.axes if adapters is None else {**self.axes, ADAPTERS: "BQ"}
        self.cache = cache
        self.offsets = {f"past_{t.entry}": f"S{t.window}" for t in cache or () if t.window is not None}
        self.program = program
        self.parameters = {n.removeprefix("model.") for n in program.graph_signature.parameters}
        self.max_positions = max_positions
        self.graph = _inline_wrappers(program.graph_module)
        self.values: dict[fx.Node, Value] = {}
        self.tuples: dict[fx.Node, Node] = {}
        self.symbols: dict[str, str] = {}
        self.out = Graph({}, [], [], {}, {})
        self.positional = self._positional()
        self.positional_values: dict[tuple[bytes, tuple[Dim, ...]], Value] = {}

    def run(self) -> Graph:
        """Translate the whole program."""
        kinds = {s.arg.name: s for s in self.program.graph_signature.input_specs}
        users = [n for n in self.graph.nodes if n.op == "placeholder" and kinds[n.name].kind == InputKind.USER_INPUT]
        names, out_names = self._names(len(users))
        for node, name in zip(users, names, strict=True):
            self._bind_symbols(node, name)
        for node, name in zip(users, names, strict=True):
            self.out.inputs[name] = self.values[node] = self._value(node, name)
        for node in self.graph.nodes:
            if node.op == "placeholder" and node not in self.values:
                spec = kinds[node.name]
                if spec.kind == InputKind.PARAMETER:
                    value = self.values[node] = self._value(node, node.name)
                    self.out.weights[value] = self._weight(spec)
                else:
                    self._held(node, spec)
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                results = [self._operand(a) for a in node.args[0]]
                self.out.outputs = [(n, v) for n, v in zip(out_names, results, strict=True) if v is not None]
        self.out.prune()
        return self.out

    def _weight(self, spec: Any) -> str:
        """Name of a parameter, or of an equal one."""
        name = str(spec.target).removeprefix("model.")
        return name if self.adapters is None else self.adapters.held_as(name, self.parameters)

    def _positional(self) -> set[fx.Node]:
        return _positional_nodes(self.graph)

    def _held(self, node: fx.Node, spec: Any) -> None:
        """Add a buffer or constant as a table of float32 or int64, except rotary frequencies, which only position
        tables read."""
        held = self.program.state_dict.get(spec.target, self.program.constants.get(spec.target))
        if isinstance(held, torch.Tensor):
            dtype = torch.float32 if held.is_floating_point() else torch.int64
            name = str(dtype).removeprefix("torch.")
            value = self.values[node] = Value(f"table_{node.name}", tuple(held.shape), name)
            self.out.tables[value] = held.detach().to(dtype).numpy()

    def _names(self, users: int) -> tuple[list[str], list[str]]:
        entries = self._entries(users - len(self.fixed))
        return [*self.fixed, *(f"past_{entry}" for entry in entries)], [
            "logits",
            *(f"present_{entry}" for entry in entries),
        ]

    def _entries(self, count: int) -> list[str]:
        if self.cache is None:
            return [f"{'kv'[i % 2]}{i // 2}" for i in range(count)]
        return [t.entry for t in self.cache]

    def _bind_symbols(self, node: fx.Node, name: str) -> None:
        offsets = self.offsets.get(name, "S")
        for at, size in enumerate(node.meta["val"].shape):
            if not isinstance(size, int):
                axes = self.fixed.get(name)
                self.symbols[str(size.node.expr)] = axes[at] if axes else offsets if at else "B"

    def _dim(self, size: Any) -> Dim:
        if isinstance(size, int):
            return size
        expr = size.node.expr
        renamed = expr.xreplace({s: sympy.Symbol(self.symbols.get(str(s), str(s))) for s in expr.free_symbols})
        return int(renamed) if renamed.is_number else str(renamed)

    def _value(self, node: fx.Node, name: str, val: Any = None) -> Value:
        val = node.meta["val"] if val is None else val
        return Value(name, tuple(self._dim(d) for d in val.shape), str(val.dtype).removeprefix("torch."))

    def _operand(self, arg: Any) -> Value | None:
        if arg is None:
            return None
        if isinstance(arg, fx.Node):
            if arg in self.positional and arg not in self.values:
                return self._table(arg)
            return self.values[arg]
        raise CompileError(f"the traced program passes {arg!r} where a tensor is expected")

    def _table(self, node: fx.Node) -> Value:
        """Add a function of only positions, [B, Q, D], [B, 1, Q, D] or [B, Q, 1, D], as a lookup in a [max_positions,
        D] table."""
        result = _evaluate(node, self.program, self.max_positions)
        if not node.meta["val"].shape or node not in self.positional:
            return self._constant(node, result)
        if result.dtype == torch.int64 and result.ndim == 2:
            return self._positions(node, result[0])
        if result.ndim == 4 and result.shape[1] == 1:
            result = result[:, 0]
        elif result.ndim == 4 and result.shape[2] == 1:
            result = result[:, :, 0]
        if result.ndim != 3 or result.shape[:2] != (1, self.max_positions):
            raise CompileError(
                f"position-dependent tensor {node.name} has shape {tuple(result.shape)}, not [B, Q, D]: this rotary "
                "form is not supported"
            )
        array = result[0].float().numpy()
        value = self.values[node] = self._value(node, node.name)
        key = (array.tobytes(), value.shape)
        if key in self.positional_values:
            self.values[node] = self.positional_values[key]
            return self.values[node]
        self.positional_values[key] = value
        table = Value(f"table_{node.name}", array.shape, "float32")
        self.out.tables[table] = array
        inputs = [table, self.out.inputs["past_lengths"], self.out.inputs["token_ids"]]
        self.out.nodes.append(Node("position_table", list(inputs), [value]))
        return value

    def _constant(self, node: fx.Node, result: Tensor) -> Value:
        """Add a value that depends only on the model's configuration."""
        if not result.is_floating_point() or any(isinstance(d, str) for d in self._value(node, "").shape):
            raise CompileError(
                f"constant {node.name} is {result.dtype} of {tuple(node.meta['val'].shape)}: this form is not supported"
            )
        value = self.values[node] = Value(f"table_{node.name}", tuple(result.shape), "float32")
        self.out.tables[value] = result.float().numpy()
        return value

    def _positions(self, node: fx.Node, result: Tensor) -> Value:
        """Positions [B, Q] for tables of learned ones; some models do not count from 0."""
        offset = int(result[0])
        if not torch.equal(result, torch.arange(offset, offset + len(result))):
            raise CompileError(
                f"position-dependent tensor {node.name} does not count tokens: this form is not supported"
            )
        value = self.values[node] = self._value(node, node.name)
        attrs = {"offset": offset, "last": offset + self.max_positions - 1}
        inputs = [self.out.inputs["past_lengths"], self.out.inputs["token_ids"]]
        self.out.nodes.append(Node("positions", list(inputs), [value], attrs))
        return value

    def _call(self, node: fx.Node) -> None:
        if node in self.positional:
            return  # evaluated when a tensor operator reads it
        name = _op_name(node)
        if name == "getitem":
            source, index = node.args
            if isinstance(source, fx.Node) and source in self.tuples:
                self.values[node] = self.tuples[source].outputs[int(index)]
            return
        if not isinstance(node.meta.get("val"), Tensor | tuple | list):
            return  # shapes already hold this arithmetic, and assertions need not run again
        first = node.args[0] if node.args else None
        if isinstance(first, fx.Node) and self._is_identity(name, node, first):
            source_value = self._operand(first)
            assert source_value is not None
            self.values[node] = source_value
            return
        inputs: list[Value | None] = []
        attrs: dict[str, Any] = {}
        schema = node.target._schema.arguments
        bound: Mapping[str, Any] = dict(zip((a.name for a in schema), node.args, strict=False)) | dict(node.kwargs)
        optional = {a.name for a in schema if str(a.type) == "Optional[Tensor]"}
        for key, arg in bound.items():
            if isinstance(arg, fx.Node) and isinstance(arg.meta.get("val"), Tensor):
                inputs.append(self._operand(arg))
            elif isinstance(arg, list | tuple) and any(self._is_tensor(a) for a in arg):
                inputs += [self._operand(a) for a in arg]
            elif arg is None and key in optional:
                inputs.append(None)
            elif key not in ("device", "pin_memory", "layout", "memory_format"):
                attrs[key] = self._attribute(arg)
        vals = node.meta["val"]
        outputs = (
            [self._value(node, f"{node.name}_{i}", v) for i, v in enumerate(vals)]
            if isinstance(vals, tuple | list)
            else [self._value(node, node.name)]
        )
        built = Node(name, inputs, outputs, attrs)
        self.out.nodes.append(built)
        self.tuples[node] = built
        self.values[node] = outputs[0]

    @staticmethod
    def _is_tensor(arg: Any) -> bool:
        return isinstance(arg, fx.Node) and isinstance(arg.meta.get("val"), Tensor)

    def _attribute(self, arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            return self._dim(arg.meta["val"])
        if isinstance(arg, torch.SymInt):
            return self._dim(arg)
        if isinstance(arg, list | tuple):
            return [self._attribute(a) for a in arg]
        return str(arg).removeprefix("torch.") if isinstance(arg, torch.dtype) else arg

    def _is_identity(self, name: str, node: fx.Node, source: fx.Node) -> bool:
        if name in _IDENTITY:
            return True
        before, after = source.meta.get("val"), node.meta["val"]
        if not isinstance(before, Tensor) or not isinstance(after, Tensor):
            return False
        if name in ("to", "_to_copy", "type_as"):
            return bool(before.dtype == after.dtype)
        same = [self._dim(d) for d in before.shape] == [self._dim(d) for d in after.shape]
        if name == "slice":
            start, end, step = [*node.args[2:], *([None] * 3)][:3]
            return step in (1, None) and bool(same or (start in (0, None) and end in (_INT64_MAX, None)))
        if name in ("view", "reshape", "expand"):
            return same
        return False


def _op_name(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name.split("::")[1])
    return getattr(target, "__name__", str(target))


def _inline_wrappers(module: fx.GraphModule) -> fx.Graph:
    """Copy of the graph with gradient-mode wrappers replaced by their bodies, and operators renumbered."""
    out = fx.Graph()
    env: dict[fx.Node, Any] = {}

    def copy(graph: fx.Graph, owner: fx.GraphModule, env: dict[fx.Node, Any]) -> Any:
        for node in graph.nodes:
            if node.op == "output":
                return fx.map_arg(node.args[0], lambda n: env[n])
            if node.op == "get_attr":
                env[node] = getattr(owner, str(node.target))
            elif node.op == "call_function" and getattr(node.target, "__name__", "") == "wrap_with_set_grad_enabled":
                body = env[node.args[1]]
                inner = dict(zip((n for n in body.graph.nodes if n.op == "placeholder"),
                                 (env[a] for a in node.args[2:]), strict=True))  # fmt: skip
                env[node] = copy(body.graph, body, inner)
            elif node.op == "call_function" and isinstance(env.get(node.args[0] if node.args else None), tuple | list):
                env[node] = env[node.args[0]][node.args[1]]
            elif node not in env:
                args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
                # renumbered, because an operator's number counts those before it, including the dropped ones
                name = _NUMBER.sub("", node.name) if node.op == "call_function" else node.name
                built = env[node] = out.create_node(node.op, node.target, args, kwargs, name, node.type)
                built.meta = dict(node.meta)
        return None

    out.output(copy(module.graph, module, env))
    return out


def _positional_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Tensor nodes that depend on past_lengths and on buffers, and on no token and no weight."""
    positional: set[fx.Node] = set()
    names = [n for n in graph.nodes if n.op == "placeholder"]
    past = next((n for n in names if n.name == "past_lengths"), None)
    free: set[fx.Node] = {n for n in names if n.name.startswith("b_") or n.name.startswith("c_")}
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.meta.get("val"), Tensor):
            continue
        tensors = [a for a in node.all_input_nodes if isinstance(a.meta.get("val"), Tensor | tuple | list)]
        if all(a is past or a in positional or a in free for a in tensors):
            (positional if any(a is past or a in positional for a in tensors) else free).add(node)
    return positional | {n for n in free if n.op == "call_function"}


def _evaluate(node: fx.Node, program: ExportedProgram, length: int) -> Tensor:
    """Value of a positional node for one row at past length 0 with `length` new tokens."""
    memo: dict[fx.Node, Any] = {}
    buffers = {s.arg.name: s.target for s in program.graph_signature.input_specs if s.kind == InputKind.BUFFER}
    constants = {
        s.arg.name: s.target for s in program.graph_signature.input_specs if s.kind == InputKind.CONSTANT_TENSOR
    }

    def value(n: fx.Node) -> Any:
        if n in memo:
            return memo[n]
        if n.op == "placeholder":
            if n.name in buffers:
                name = buffers[n.name]
                result: Any = program.state_dict.get(name, program.constants.get(name))
            elif n.name in constants:
                result = program.constants[constants[n.name]]
            elif n.name in ("token_ids", ADAPTERS):
                result = torch.zeros(1, length, dtype=torch.long)
            else:
                result = torch.zeros(1, dtype=torch.long)
        else:
            args = fx.map_arg(n.args, value)
            kwargs = fx.map_arg(n.kwargs, value)
            result = n.target(*args, **kwargs)
        memo[n] = result
        return result

    with torch.no_grad():
        out = value(node)
    assert isinstance(out, Tensor)
    return out


RESULT = "result"
"""The one output: hidden states, or logits."""


def import_encoder(program: ExportedProgram) -> Graph:
    """Translate `program`: inputs by their names, the output RESULT, and weights by their names without "model.".
    Raises CompileError naming an operator that has no form."""
    return _EncoderImporter(program, 0, None).run()


class _EncoderImporter(Importer):
    axes: ClassVar[Mapping[str, str]] = {TOKEN_IDS: "BQ", LENGTHS: "B", TYPE_IDS: "BQ"}

    def _positional(self) -> set[fx.Node]:
        return set()

    def _names(self, users: int) -> tuple[list[str], list[str]]:
        return list(self.axes)[:users], [RESULT]
