"""RMS norms of a traced graph as one operator each (fuse.py says what they compute)."""

from __future__ import annotations

from llmc.compiler.program.ir import Graph, Node, Value
from llmc.compiler.program.match import Matcher, after_inputs, either


def fuse_rms_norm(graph: Graph) -> None:
    """weight · (x · rsqrt(mean(x²) + eps)) → rms_norm; the weight may be a number more."""
    m = Matcher(graph)

    def is_weight(value: Value) -> bool:
        raised = m.made_by(value, "add")
        return value in graph.weights or bool(raised and "other" in raised.attrs and raised.inputs[0] in graph.weights)

    def is_root(value: Value) -> bool:
        power = m.made_by(value, "rsqrt", "pow")
        return power is not None and (power.op == "rsqrt" or power.attrs.get("exponent") == -0.5)

    for node in graph.nodes:
        if node.op != "mul" or (pair := either(node, is_weight)) is None:
            continue
        weight, scaled = pair
        inner = m.made_by(scaled, "mul")
        found = either(inner, is_root) if inner else None
        if found is None or len(weight.shape) != 1:
            continue
        root, x = found
        eps = _mean_square_eps(m, m.producers[root].inputs[0], x)
        if eps is not None:
            node.op, node.inputs, node.attrs = "rms_norm", [x, weight], {"eps": eps}


def _mean_square_eps(m: Matcher, value: Value | None, x: Value) -> float | None:
    added = m.made_by(value, "add")
    mean = m.made_by(added.inputs[0], "mean") if added and "other" in added.attrs else None
    power = m.made_by(mean.inputs[0], "pow") if mean else None
    if added is None or mean is None or power is None or mean.attrs.get("dim") != [-1]:
        return None
    if power.attrs.get("exponent") != 2 or power.inputs[0] is not x:
        return None
    return float(added.attrs["other"])


def norm_before_transpose(graph: Graph) -> None:
    """rms_norm(transpose(x)) → transpose(rms_norm(x)), where the last axis stays: heads lie by token for longer."""
    m = Matcher(graph)
    for node in graph.nodes:
        turned = m.made_by(node.inputs[0], "transpose") if node.op == "rms_norm" else None
        if turned is None or not m.sole(turned.out) or {turned.attrs["dim0"], turned.attrs["dim1"]} != {1, 2}:
            continue
        source = turned.inputs[0]
        assert source is not None
        normed = Value(f"{node.out.name}_by_token", source.shape, source.dtype)
        graph.nodes[graph.nodes.index(node)] = Node("transpose", [normed], [node.out], dict(turned.attrs))
        graph.nodes[graph.nodes.index(turned)] = Node("rms_norm", [source, *node.inputs[1:]], [normed], node.attrs)
    graph.nodes = after_inputs(graph.nodes)


def fuse_residual(graph: Graph) -> None:
    """rms_norm(x + y) → skip_rms_norm, which also yields x + y, where that is hidden states [B, Q, H]; a sum of heads
    [B, H, Q, D] is a rotary embedding's."""
    m = Matcher(graph)
    fused: set[int] = set()
    for node in graph.nodes:
        if node.op != "rms_norm":
            continue
        total = m.made_by(node.inputs[0], "add")
        if total is None or len(total.inputs) != 2 or id(total) in fused or total.attrs.get("alpha", 1) != 1:
            continue
        if len(total.out.shape) > 3 or any(v is None or v.shape != total.out.shape for v in total.inputs):
            continue
        fused.add(id(total))
        node.op, node.inputs = "skip_rms_norm", [*total.inputs, node.inputs[1]]
        node.outputs = [node.out, total.out]
    graph.nodes = after_inputs([n for n in graph.nodes if id(n) not in fused])
