"""Specialise a traced program with symbolic shapes to one portable program per bucket, without tracing again.

A traced program is a straight line of ATen operators whose sizes are arithmetic over B, Q and S. Specialising walks it
once over tensors without storage. Sizes become the bucket's numbers. Size arithmetic and the guards that tracing
recorded are evaluated; a guard that fails is an error. Operators that change nothing or repeat an earlier one are
dropped, and recurrent operators are expanded. Each remaining tensor gets its shape and strides at this size. Tracing
also assumes without a guard that no size is 1. Tests check this: they find the same operators in a fresh static trace
of every supported architecture. Verification checks it as well.

The graph stays torch's own model.json (runtime/portable_program.py), which torch.export.load accepts.

Portable programs contain neither llmc's operators nor loops: at a fixed number of tokens the operators of
frontend/recurrent.py are a sequence of matmuls (frontend/chunked.py).
"""

from __future__ import annotations

import io
import json
import threading
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch._export.serde import serialize as serde
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import make_fx

from llmc.compiler.frontend import chunked
from llmc.compiler.program.sized import ASSERTION, CHECKED_ELSEWHERE, SIZE, SIZE_ARITHMETIC, offsets_of
from llmc.errors import CompileError
from llmc.runtime.portable_program import (
    DTYPES,
    FIXED_INPUTS,
    MODEL,
    ROOT,
    ProgramFields,
    arguments,
    operator,
    output_names,
    weight_names,
)

if TYPE_CHECKING:
    from llmc.runtime.cache_shape import CacheShape

_PREFIX = "torch.ops.llmc."
_WRITTEN: dict[str, Any] = {
    "causal_conv": chunked.causal_conv,
    "gated_delta": chunked.gated_delta,
    "state_scan": chunked.state_scan,
}
_DEFAULT = ("layout", "pin_memory")
"""Arguments that always have their default."""
_SERIAL_DTYPES = {getattr(torch, name): code for code, name in DTYPES.items()}


def is_expanded(target: object) -> bool:
    """Whether an operator is a recurrent one that has to be expanded."""
    return isinstance(target, str) and target.startswith(_PREFIX) and _name(target) in _WRITTEN


def operator_of(target: str) -> Any:
    """The operator that a node calls, for its schema."""
    return getattr(torch.ops.llmc, _name(target)).default


def expanded(node: Mapping[str, Any], given: Sequence[Any]) -> Iterator[ProgramFields]:
    """Nodes that compute `node` for `given`, fake tensors and numbers in the operator's order. Their names start with
    the name of the node's first output; the last ones compute its outputs."""
    outputs, _ = output_names(node)
    names = [i["arg"]["as_tensor"]["name"] for i in node["inputs"] if "as_tensor" in i["arg"]]
    tensors = [t for t in given if isinstance(t, Tensor)]
    form = [_Hole() if isinstance(t, Tensor) else t for t in given]
    graph = make_fx(partial(_compute, _WRITTEN[_name(node["target"])], form))(tensors).graph
    return _nodes(graph, names, outputs)


def described(tensor: Tensor) -> ProgramFields:
    """model.json's description of a tensor, except for sizes, strides and offset."""
    return {
        "dtype": _SERIAL_DTYPES[tensor.dtype], "requires_grad": False, "layout": 7,
        "device": {"type": "cpu", "index": None},
    }  # fmt: skip


class _Hole:
    """Marks a tensor argument."""


def _compute(written: Any, form: Sequence[Any], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Compute in float32, and convert to the dtypes of the first argument (or value) and of the state."""
    left = iter(tensors)
    given = [next(left) if isinstance(part, _Hole) else part for part in form]
    held = next(t for t in reversed(given) if isinstance(t, Tensor) and t.is_floating_point())
    out, state = written(torch, *(_wide(t) for t in given))
    return [out.to(tensors[0].dtype).contiguous(), state.to(held.dtype)]


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def _nodes(graph: fx.Graph, names: Sequence[str], outputs: Sequence[str]) -> Iterator[ProgramFields]:
    given = iter(names)
    (end,) = (node for node in graph.nodes if node.op == "output")
    final = dict(zip(end.args[0], outputs, strict=True))
    named: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            named[node] = next(given)
        elif node.op == "call_function":
            named[node] = final.get(node, f"{outputs[0]}_{node.name}")
            yield _node(node, named)


def _node(node: fx.Node, named: Mapping[fx.Node, str]) -> ProgramFields:
    schema = node.target._schema.arguments
    given = [(a.name, value, False) for a, value in zip(schema, node.args, strict=False)]
    given += [(name, value, True) for name, value in node.kwargs.items() if name not in _DEFAULT]
    inputs = [(name, _argument(value, named), keyword) for name, value, keyword in given]
    return _built(f"torch.ops.{node.target!s}", inputs, named[node])


def _built(target: str, inputs: Sequence[tuple[str, ProgramFields, bool]], name: str) -> ProgramFields:
    return {
        "target": target, "name": name, "metadata": {}, "is_hop_single_tensor_return": None,
        "inputs": [{"name": key, "arg": arg, "kind": 2 if keyword else 1} for key, arg, keyword in inputs],
        "outputs": [{"as_tensor": {"name": name}}],
    }  # fmt: skip


def _argument(value: Any, named: Mapping[fx.Node, str]) -> ProgramFields:
    if isinstance(value, fx.Node):
        return {"as_tensor": {"name": named[value]}}
    if isinstance(value, list | tuple):
        if any(isinstance(v, fx.Node) for v in value):
            return {"as_tensors": [{"name": named[v]} for v in value]}
        return {"as_ints": list(value)}
    if isinstance(value, torch.dtype):
        return {"as_scalar_type": _SERIAL_DTYPES[value]}
    if isinstance(value, torch.device):
        return {"as_device": {"type": "cpu", "index": None}}
    if value is torch.contiguous_format:
        return {"as_memory_format": 1}
    for kind, held in (("as_bool", bool), ("as_int", int), ("as_float", float)):
        if type(value) is held:
            return {kind: value}
    raise TypeError(f"an argument {value!r:.80}")


def _name(target: str) -> str:
    return target.removeprefix(_PREFIX).partition(".")[0]


_TORCH_DTYPES = {code: getattr(torch, name) for code, name in DTYPES.items()}
_SAME_SHAPE_IS_SAME = frozenset(
    f"torch.ops.aten.{name}"
    for name in ("slice.Tensor", "view.default", "reshape.default", "expand.default", "alias.default", "detach.default")
)
_WALKING = threading.Lock()
"""Fake tensors keep caches per process, and with the interpreter lock two concurrent walks gain nothing. The patches to
torch while one program is written affect all threads."""


@contextmanager
def _no_canonical_copy() -> Iterator[None]:
    """torch also creates a canonical copy as a check, and drops it: half of the time of saving."""
    copy = serde.canonicalize
    serde.canonicalize = lambda program, *_, **__: program
    try:
        yield
    finally:
        serde.canonicalize = copy


def serialise(exported: ExportedProgram) -> ProgramFields:
    """The graph of a traced program as torch's model.json, without debug information. Raises CompileError."""
    if exported.state_dict or exported.constants:
        held = [*exported.state_dict, *exported.constants]
        raise CompileError(
            f"the traced program contains tensors ({', '.join(held[:3])}), which portable programs must not"
        )
    buffer = io.BytesIO()
    with _WALKING, _no_canonical_copy():
        torch.export.save(exported, buffer)
    with zipfile.ZipFile(buffer) as archive:
        program: ProgramFields = json.loads(archive.read(ROOT + MODEL))
    for node in program["graph_module"]["graph"]["nodes"]:
        node["metadata"] = {}
    return program


def specialise(
    program: ProgramFields, batch: int, query: int, context: int, cache: CacheShape | None = None
) -> ProgramFields:  # fmt: skip
    """Copy of `program` at B = batch, Q = query and S = context, over a `cache` with ring buffers if given. Raises
    CompileError."""
    graph = program["graph_module"]["graph"]
    inputs = [given["as_tensor"]["name"] for given in graph["inputs"]]
    caches = inputs[len(FIXED_INPUTS) : len(inputs) - len(weight_names(program))]
    walk = _Walk((batch, query, context), offsets_of(caches, context, cache))
    try:
        with _WALKING, torch.no_grad(), FakeTensorMode():
            special = walk.run(graph)
    except CompileError:
        raise
    except Exception as e:
        sizes = f"batch {batch}, query {query}, context {context}"
        raise CompileError(f"the traced program does not fit {sizes}: {e}") from e
    module = {**program["graph_module"], "graph": special}
    return {**program, "graph_module": module, "range_constraints": {}, "guards_code": []}


class _Walk:
    """One specialisation: the value of each name in the graph, and the remaining nodes."""

    def __init__(self, sizes: tuple[int, int, int], offsets: Mapping[str, int]) -> None:
        self.sizes = sizes
        self.offsets = offsets
        self.values: dict[str, Any] = {}
        self.renamed: dict[str, str] = {}
        self.nodes: list[ProgramFields] = []
        self.known: dict[str, list[str]] = {}
        self.described: dict[str, ProgramFields] = {}

    def run(self, graph: Mapping[str, Any]) -> ProgramFields:
        for given in graph["inputs"]:
            name = given["as_tensor"]["name"]
            self.values[name] = self._input(name, graph["tensor_values"][name])
        for node in graph["nodes"]:
            self._node(node)
        outputs = [{"as_tensor": {"name": self._final(o["as_tensor"]["name"])}} for o in graph["outputs"]]
        nodes = _needed(self.nodes, [o["as_tensor"]["name"] for o in outputs])
        names = [i["as_tensor"]["name"] for i in graph["inputs"]]
        names += [name for node in nodes for name in output_names(node)[0]]
        symbols: ProgramFields = {"sym_int_values": {}, "sym_bool_values": {}, "sym_float_values": {}}
        metas = {name: self._meta(name, graph["tensor_values"].get(name) or self.described[name]) for name in names}
        return {**graph, **symbols, "outputs": outputs, "nodes": nodes, "tensor_values": metas}

    def _input(self, name: str, meta: Mapping[str, Any]) -> Tensor:
        batch, query, _ = self.sizes
        symbols = (batch, query) if name in FIXED_INPUTS else (batch, None, self.offsets.get(name))
        sizes = [symbols[i] if "as_expr" in size else size["as_int"] for i, size in enumerate(meta["sizes"])]
        return torch.empty(sizes, dtype=_TORCH_DTYPES[meta["dtype"]])

    def _meta(self, name: str, meta: Mapping[str, Any]) -> ProgramFields:
        value: Tensor = self.values[name]
        traced = _TORCH_DTYPES[meta["dtype"]]
        if value.dtype != traced:
            raise CompileError(f"{name} is {value.dtype} at this size, and was traced as {traced}")
        return {
            **meta, "sizes": [{"as_int": s} for s in value.shape], "strides": [{"as_int": s} for s in value.stride()],
            "storage_offset": {"as_int": value.storage_offset()},
        }  # fmt: skip

    def _final(self, name: str) -> str:
        return self.renamed.get(name, name)

    def _node(self, node: ProgramFields) -> None:
        target = node["target"]
        if target == CHECKED_ELSEWHERE:
            return
        if target in SIZE_ARITHMETIC or target == SIZE:
            self._size(node)
        elif target == ASSERTION:
            if not self._number(node["inputs"][0]["arg"]):
                batch, query, context = self.sizes
                reason = node["inputs"][1]["arg"].get("as_string", "a guard")
                raise CompileError(f"{reason}, at batch {batch}, query {query}, context {context}")
        else:
            self._operator(node)

    def _size(self, node: ProgramFields) -> None:
        given = [self._number(i["arg"]) for i in node["inputs"]]
        compute = _size_of if node["target"] == SIZE else SIZE_ARITHMETIC[node["target"]]
        (output,) = node["outputs"]
        ((_, named),) = output.items()
        self.values[named["as_name"]] = compute(*given)

    def _number(self, tagged: Mapping[str, Any]) -> Any:
        """Value of an argument of size arithmetic: a number, or the tensor whose size is read."""
        ((_, value),) = tagged.items()
        if not isinstance(value, Mapping):
            return value
        ((kind, inner),) = value.items()
        return self.values[self._final(inner)] if kind in ("as_name", "name") else inner

    def _operator(self, node: ProgramFields) -> None:
        built: ProgramFields = {**node, "inputs": [{**i, "arg": self._argument(i["arg"])} for i in node["inputs"]]}
        names, several = output_names(node)
        identity = json.dumps([built["target"], built["inputs"]], sort_keys=True)
        if identity in self.known:
            self.renamed.update(zip(names, self.known[identity], strict=True))
            return
        if is_expanded(built["target"]):
            args, _ = arguments(built, operator_of(built["target"])._schema, self.values.__getitem__)
            for written in expanded(built, args):
                self._operator(written)
            return
        target = operator(built["target"])
        args, kwargs = arguments(built, target._schema, self.values.__getitem__)
        result = target(*args, **kwargs)
        if not several and isinstance(first := args[0] if args else None, Tensor) and _unchanged(built, first, result):
            self.renamed[names[0]] = built["inputs"][0]["arg"]["as_tensor"]["name"]
            return
        self.known[identity] = names
        results = result if several else [result]
        self.values.update(zip(names, results, strict=True))
        self.described.update((name, described(tensor)) for name, tensor in zip(names, results, strict=True))
        self.nodes.append(built)

    def _argument(self, tagged: Mapping[str, Any]) -> ProgramFields:
        """An argument with numbers for sizes, and the remaining names."""
        ((kind, value),) = tagged.items()
        if kind == "as_tensor":
            return {kind: {"name": self._final(value["name"])}}
        if kind == "as_tensors":
            return {kind: [{"name": self._final(v["name"])} for v in value]}
        if kind == "as_optional_tensors":
            present = [v if "as_none" in v else self._argument(v) for v in value]
            return {kind: present}
        if kind == "as_sym_int":
            return {"as_int": self._number({kind: value})}
        if kind == "as_sym_ints":
            return {"as_ints": [self._number({kind: v}) for v in value]}
        return dict(tagged)


def _size_of(tensor: Tensor, dim: int) -> int:
    return int(tensor.shape[dim])


def _unchanged(node: Mapping[str, Any], before: Tensor, after: Tensor) -> bool:
    """Whether an operator returned its first argument: the same object, or all of it in the same shape."""
    return after is before or (
        node["target"] in _SAME_SHAPE_IS_SAME and after.shape == before.shape and _step(node) == 1
    )


def _step(node: Mapping[str, Any]) -> int:
    return next((int(i["arg"]["as_int"]) for i in node["inputs"] if i["name"] == "step"), 1)


def _needed(nodes: Sequence[ProgramFields], outputs: Sequence[str]) -> list[ProgramFields]:
    needed = set(outputs)
    kept: list[ProgramFields] = []
    for node in reversed(nodes):
        if needed.intersection(output_names(node)[0]):
            kept.append(node)
            needed.update(name for i in node["inputs"] for name in _tensors(i["arg"]))
    return kept[::-1]


def _tensors(tagged: Mapping[str, Any]) -> list[str]:
    ((kind, value),) = tagged.items()
    if kind == "as_tensor":
        return [value["name"]]
    if kind == "as_tensors":
        return [v["name"] for v in value]
    if kind == "as_optional_tensors":
        return [v["as_tensor"]["name"] for v in value if "as_none" not in v]
    return []
