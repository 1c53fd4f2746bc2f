"""Operators of layers with a state (frontend/recurrent/operators.py) as llmc's own (kernels/source).

Rows lie end to end there, and each replaces the state of its slot in place. They take the rows for both lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from llmc.compiler.frontend.recurrent.chunked import NORM_EPS
from llmc.compiler.targets.onnxruntime.emitter import OWN, ROWS

if TYPE_CHECKING:
    from llmc.compiler.program.ir import Node
    from llmc.compiler.targets.onnxruntime.emitter import Emitter


def _causal_conv(to: Emitter, node: Node) -> None:
    _emit(to, node, "CausalConv", silu=int(node.attrs["silu"]))


def _gated_delta(to: Emitter, node: Node) -> None:
    _emit(to, node, "GatedDelta", normalise=int(node.attrs["normalise"]), eps=NORM_EPS)


def _state_scan(to: Emitter, node: Node) -> None:
    _emit(to, node, "StateScan")


def _emit(to: Emitter, node: Node, op: str, **attrs: Any) -> None:
    *given, _, _ = (to.name(v) for v in node.inputs)
    to.add(op, [*given, ROWS], [o.name for o in node.outputs], OWN, **attrs)


RECURRENT_KERNELS: Mapping[str, Callable[[Emitter, Node], None]] = {
    "causal_conv": _causal_conv, "gated_delta": _gated_delta, "state_scan": _state_scan,
}  # fmt: skip
"""By the operator's name, as program/ir.py writes it."""
