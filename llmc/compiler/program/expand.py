"""Operators of layers with a state in a portable program of one size: written out in ATen's operators.

Portable programs have no operators of ours, and loops have no place in them: at a fixed number of tokens the operators
of frontend/recurrent are a line of matrix products (frontend/recurrent/chunked.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from llmc.compiler.frontend.recurrent import chunked
from llmc.runtime.portable_program import DTYPES, Fields, output_names

_PREFIX = "torch.ops.llmc."
_WRITTEN: dict[str, Any] = {
    "causal_conv": chunked.causal_conv,
    "gated_delta": chunked.gated_delta,
    "state_scan": chunked.state_scan,
}
_DEFAULT = ("layout", "pin_memory")
"""Arguments that are never other than by default."""
_CODES = {getattr(torch, name): code for code, name in DTYPES.items()}


def is_expanded(target: object) -> bool:
    """Whether an operator's name is one of those."""
    return isinstance(target, str) and target.startswith(_PREFIX) and _name(target) in _WRITTEN


def operator_of(target: str) -> Any:
    """The operator that a node calls, for its schema."""
    return getattr(torch.ops.llmc, _name(target)).default


def expanded(node: Mapping[str, Any], given: Sequence[Any]) -> Iterator[Fields]:
    """The nodes that compute what `node` does of `given`, fake tensors and numbers in the operator's order.

    Names of what they make start with the name of the node's first output; the last ones make its outputs.
    """
    outputs, _ = output_names(node)
    names = [i["arg"]["as_tensor"]["name"] for i in node["inputs"] if "as_tensor" in i["arg"]]
    tensors = [t for t in given if isinstance(t, Tensor)]
    form = [_Hole() if isinstance(t, Tensor) else t for t in given]
    graph = make_fx(partial(_compute, _WRITTEN[_name(node["target"])], form))(tensors).graph
    return _nodes(graph, names, outputs)


def described(tensor: Tensor) -> Fields:
    """What model.json says of a tensor, but for sizes, strides and offset."""
    return {
        "dtype": _CODES[tensor.dtype], "requires_grad": False, "device": {"type": "cpu", "index": None}, "layout": 7,
    }  # fmt: skip


class _Hole:
    """Where a tensor belongs."""


def _compute(written: Any, form: Sequence[Any], tensors: Sequence[Tensor]) -> list[Tensor]:
    """In float32, and back into what the operator gives: its first argument's dtype or value's, and the state's."""
    left = iter(tensors)
    given = [next(left) if isinstance(part, _Hole) else part for part in form]
    held = next(t for t in reversed(given) if isinstance(t, Tensor) and t.is_floating_point())
    out, state = written(torch, *(_wide(t) for t in given))
    return [out.to(tensors[0].dtype).contiguous(), state.to(held.dtype)]


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def _nodes(graph: fx.Graph, names: Sequence[str], outputs: Sequence[str]) -> Iterator[Fields]:
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


def _node(node: fx.Node, named: Mapping[fx.Node, str]) -> Fields:
    schema = node.target._schema.arguments
    given = [(a.name, value, False) for a, value in zip(schema, node.args, strict=False)]
    given += [(name, value, True) for name, value in node.kwargs.items() if name not in _DEFAULT]
    inputs = [(name, _argument(value, named), keyword) for name, value, keyword in given]
    return _made(f"torch.ops.{node.target!s}", inputs, named[node])


def _made(target: str, inputs: Sequence[tuple[str, Fields, bool]], name: str) -> Fields:
    return {
        "target": target, "name": name, "metadata": {}, "is_hop_single_tensor_return": None,
        "inputs": [{"name": key, "arg": arg, "kind": 2 if keyword else 1} for key, arg, keyword in inputs],
        "outputs": [{"as_tensor": {"name": name}}],
    }  # fmt: skip


def _argument(value: Any, named: Mapping[fx.Node, str]) -> Fields:
    """An argument as model.json has it."""
    if isinstance(value, fx.Node):
        return {"as_tensor": {"name": named[value]}}
    if isinstance(value, list | tuple):
        if any(isinstance(v, fx.Node) for v in value):
            return {"as_tensors": [{"name": named[v]} for v in value]}
        return {"as_ints": list(value)}
    if isinstance(value, torch.dtype):
        return {"as_scalar_type": _CODES[value]}
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
