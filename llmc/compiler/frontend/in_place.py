"""Remove operators that write into their input from a traced program: compilers need immutable values.

torch.export keeps `x /= s` as `div_`. Where nothing reads x afterwards, `x / s` replaces it. Other in-place writes have
no such form and are refused.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.export import ExportedProgram

from llmc.errors import CompileError


def without_writes(exported: ExportedProgram) -> ExportedProgram:
    """Replace each operator in `exported` that writes into its first input by the one that returns the result. Raises
    CompileError where that input, or a tensor that shares its memory, is read later."""
    nodes = list(exported.graph.nodes)
    order = {node: i for i, node in enumerate(nodes)}
    for node in nodes:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
            continue
        written = node.args[0]
        twin = getattr(torch.ops.aten, target._schema.name.removeprefix("aten::").removesuffix("_"), None)
        plain = getattr(twin, target._overloadname, None)
        if plain is None or any(order[user] > order[node] for user in _readers(written)):
            raise CompileError(f"the model writes in place ({node.format_node()}), and reads the written tensor later")
        node.target = plain
    exported.graph_module.recompile()
    return exported


def _readers(written: fx.Node) -> list[fx.Node]:
    """Nodes that read a tensor, a view of it, or its base."""
    source = written
    while _is_view(source):
        source = source.args[0]
    found, open_ = [], [source]
    while open_:
        node = open_.pop()
        found += node.users
        open_ += [user for user in node.users if _is_view(user)]
    return found


def _is_view(node: fx.Node) -> bool:
    """Whether a result shares its first input's memory, as the operator's schema says."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    returns = node.target._schema.returns
    return bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write
