"""Attention over whole texts, without a cache, in ONNX: products, a mask and a softmax, heads beside each other.

Rule of torch.nn.functional.scaled_dot_product_attention (torch 2.13): softmax(q · kᵀ · scale + mask) · v over
[B, H, Q, D], where a mask of truth values says what is seen; scale is 1 / √D unless given.
"""

from __future__ import annotations

import math

import numpy as np

from llmc.compiler.program.ir import Node, Value
from llmc.compiler.targets.onnxruntime.emitter import Emitter
from llmc.errors import CompileError

_UNSEEN = float(np.finfo(np.float32).min)
_FUSED = "com.microsoft"


def emit_whole_attention(to: Emitter, node: Node) -> None:
    """An attention node of a program without a cache; raises CompileError for a form that encoders do not have."""
    query, key, value, *mask = node.inputs
    assert query is not None
    assert key is not None
    if node.attrs.get("is_causal") or node.attrs.get("dropout_p") or query.shape[1] != key.shape[1]:
        raise CompileError(
            f"attention with {node.attrs} over {key.shape[1]} heads has no ONNX lowering (at {node.out})"
        )
    stem = node.out.name
    scale = float(node.attrs.get("scale") or 1 / math.sqrt(int(query.shape[-1])))
    factors = [to.name(query), to.name(key)]
    scores = to.add("FusedMatMul", factors, [f"{stem}_scores"], _FUSED, transB=1, alpha=scale)
    if mask and mask[0] is not None:
        scores = to.add("Add", [scores, _added(to, mask[0])], [f"{stem}_seen"])
    shares = to.add("Softmax", [scores], [f"{stem}_shares"], axis=-1)
    to.add("MatMul", [shares, to.name(value)], [stem])


def _added(to: Emitter, mask: Value) -> str:
    """What is added to scores, one for all layers: 0 where a token is seen, the least number elsewhere."""
    if mask.dtype != "bool":
        return to.name(mask)
    name = f"{mask.name}_added"
    if name not in to.shared:
        zero, unseen = (to.const(number, np.float32) for number in (0, _UNSEEN))
        to.shared[name] = to.add("Where", [to.name(mask), zero, unseen], [name])
    return name
