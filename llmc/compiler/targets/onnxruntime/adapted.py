"""What adapters that requests choose add to products, as an operator of llmc's own (kernels/source/adapted.c)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnx import TensorProto

from llmc.compiler.targets.onnxruntime.emitter import OWN
from llmc.compiler.targets.onnxruntime.kernels.adapters import line
from llmc.compiler.weights.recipes import Recipe

if TYPE_CHECKING:
    from llmc.compiler.program.ir import Node
    from llmc.compiler.targets.onnxruntime.emitter import Emitter


def emit_adapted(to: Emitter, node: Node) -> None:
    """Its matrices are in 8 bits, whatever others are in."""
    *given, low = node.inputs[:4]
    high = [v for v in node.inputs[4:] if v is not None]
    assert low is not None
    (ranks, width), rows = (int(d) for d in low.shape), sum(int(v.shape[0]) for v in high)
    sources = tuple(to.graph.weights[v] for v in (low, *high))
    parts = {
        "low": (TensorProto.UINT8, (ranks, line(width))), "high": (TensorProto.UINT8, (ranks, line(rows))),
        "scales": (TensorProto.FLOAT, (ranks,)),
    }  # fmt: skip
    factors = [
        to.external(Recipe(f"{'+'.join(sources)}.{part}", f"lora_{part}", sources), dtype, shape)
        for part, (dtype, shape) in parts.items()
    ]
    names = [*map(to.name, given), *factors, to.const(node.attrs["ends"])]
    to.add("Adapted", names, [node.out.name, f"{node.out.name}_scratch"], OWN)
