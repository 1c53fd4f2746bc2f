"""Lowers the fused graph to ONNX with ONNX Runtime's operators and external weights.

One model with symbolic B, Q, S and R covers every bucket; `bind` fixes some of them for one bucket. Inputs and outputs
follow the program contract (frontend/trace.py); caches are updated in place when past and present are bound to one
buffer. One input differs: logit_rows [R] int64, indices into [B · Q] of the tokens whose logits are wanted, replaces
new_lengths [B], and logits are [R, V]. A step that samples passes each row's last live token. Layers with recurrent
state also take new_lengths.

With llmc's own operators (onnxruntime/kernels) a graph takes `rows` [N, 4] int64 instead of past_lengths: rows of any
lengths are packed in token_ids, and each is (slot, tokens in the cache, first token, tokens). KV caches are float16,
the bits of bfloat16, or quantized values with their scales (kernels/source/cache_lines.h). Recurrent states are float32
and replaced in place.

Adapters that requests choose are an operator of llmc's own (kernels/source/adapted.c).

`hand_on_words` selects the values of prefill tokens that are passed in bfloat16 to matmuls (kernels/source/words.h).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, ValueInfoProto, helper

from llmc.compiler.architectures.shared.experts import stay_floats
from llmc.compiler.program.ir import Graph, Node, Value
from llmc.compiler.targets.onnxruntime.attention import (
    MICROSOFT,
    RECURRENT,
    emit_attention,
    emit_recurrent_kernel,
    emit_whole_attention,
)
from llmc.compiler.targets.onnxruntime.emitter import DECODING, LOGIT_ROWS, ONNX_TYPES, OWN, ROWS, Emitter
from llmc.compiler.targets.onnxruntime.formats import FOLDED_BLOCK, TABLES, MatrixFormat, OnnxOptions
from llmc.compiler.targets.onnxruntime.kernels.panels import line, panel_bytes, part_of
from llmc.compiler.targets.onnxruntime.onnx_model import shorten
from llmc.compiler.targets.onnxruntime.options import BF16, F16, INT8, require_heads
from llmc.compiler.targets.onnxruntime.plain import PLAIN, emit_expert_linear, emit_experts
from llmc.compiler.weights.recipes import Recipe
from llmc.errors import CompileError
from llmc.runtime.cache_shape import SCALE_BYTES

_DECODING = 3
_DEPTH = 32
"""Numbers that the kernels process at once; a gate's results fill whole groups of them."""


def hand_on_words(nodes: list[Any], outputs: Iterable[str]) -> None:
    """Let norms and gates that only matmuls read output bfloat16, to which the matmuls round anyway, instead of floats.

    nodes: NodeProtos of one graph whose matmuls take prefill tokens in bfloat16; changed in place. outputs: the graph's
    outputs, which stay unchanged.
    """
    readers: dict[str, list[tuple[Any, int]]] = defaultdict(list)
    for node in nodes:
        for at, name in enumerate(node.input):
            readers[name].append((node, at))
    kept = set(outputs)
    for node in nodes:
        name = node.output[0]
        if not _gives(node) or name in kept or not readers[name] or not all(_takes(*by) for by in readers[name]):
            continue
        if node.op_type == "AddNorm":
            node.input.append(DECODING)
        node.output.extend([*[""] * (2 - len(node.output)), f"{name}_words"])
        for reader, _ in readers[name]:
            reader.input.append(f"{name}_words")


def _gives(node: Any) -> bool:
    if not _multiplies_prompts(node):
        return bool(node.domain == OWN and node.op_type == "AddNorm")
    sizes = {a.name: a.i for a in node.attribute}
    return bool(sizes["gated"]) and sizes["rows"] % (2 * _DEPTH) == 0


def _takes(node: Any, at: int) -> bool:
    return at == 0 and _multiplies_prompts(node)


def _multiplies_prompts(node: Any) -> bool:
    """Whether the node multiplies all of a step's tokens, with those of prefills in bfloat16."""
    ours = node.domain == OWN and node.op_type == "Linear"
    return ours and len(node.input) > _DECODING and node.input[_DECODING] == DECODING


def emit_adapted(to: Emitter, node: Node) -> None:
    """Emit an adapter node; its matrices are always in 8 bits."""
    given, low, high = node.inputs[:3], node.value(3), [v for v in node.inputs[4:] if v is not None]
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


OPSET, IR_VERSION = 21, 10
_ATTENTION = {
    F16: ("Attention", TensorProto.FLOAT16),
    BF16: ("RoundedAttention", TensorProto.UINT16),
    INT8: ("CodedAttention", TensorProto.UINT8),
}
"""llmc's operator for each KV cache precision, and the cache's ONNX type."""


@dataclass
class OnnxGraph:
    """An ONNX model without weights, the recipes of its tensors, and its computed tables.

    `folded`: matrices whose packed form must include offsets, with the recipe of the offsets; no graph reads them.
    """

    model: ModelProto
    recipes: list[Recipe]
    tables: dict[str, NDArray[np.float32]]
    folded: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Matmul:
    """x [.., width] · Wᵀ + bias as `out`, W [rows, width] of stacked sources; names, "" for no bias."""

    x: str
    out: str
    sources: list[str]
    rows: int
    width: int
    bias: str
    held: MatrixFormat


def to_onnx(graph: Graph, options: OnnxOptions) -> OnnxGraph:
    """Emit `graph`. Raises CompileError naming an operator that has no ONNX form here."""
    return _Model(graph, options).run()


class _Model(Emitter):
    """Emits fused operators by its methods, and all others by plain.py's functions."""

    def __init__(self, graph: Graph, options: OnnxOptions) -> None:
        super().__init__(graph, options)
        self.folded: dict[str, str] = {}

    def run(self) -> OnnxGraph:
        for node in self.graph.nodes:
            if node.op in _FUSED and (node.op != "split" or "parts" in node.attrs):
                _FUSED[node.op](self, node)
            elif node.op in PLAIN:
                PLAIN[node.op](self, node)
            elif node.op in RECURRENT:
                (emit_recurrent_kernel if self.options.panels else RECURRENT[node.op])(self, node)
            else:
                raise CompileError(f"operator {node.op!r} has no ONNX lowering (at {node.out})")
        outputs = []
        for name, v in self.graph.outputs:
            self._rename(v.name, name)
            outputs.append(self._info(v, name))
        inputs = [*(self._info(v, name) for name, v in self.graph.inputs.items()), *self.starting.values()]
        if self.options.panels:
            rows = helper.make_tensor_value_info(ROWS, TensorProto.INT64, ["N", 4])
            inputs = [rows if info.name == "past_lengths" else info for info in inputs]
            for info in (*inputs, *outputs):
                if info.name.startswith(("past_", "present_")):
                    dims = info.type.tensor_type.shape.dim
                    dims[0].dim_param = "P"
                    if any(dim.dim_param for dim in dims[1:]):  # a recurrent state has no dimension of tokens
                        info.type.tensor_type.elem_type = _ATTENTION[self.options.cache][1]
                        dims[3].dim_value += SCALE_BYTES if self.options.cache == INT8 else 0
        if "last_rows" in self.shared:
            read = any("new_lengths" in node.input for node in self.nodes)
            at = next(i for i, info in enumerate(inputs) if info.name == "new_lengths")
            logit_rows = helper.make_tensor_value_info(LOGIT_ROWS, TensorProto.INT64, ["R"])
            inputs[at : at + 1] = [*(inputs[at : at + 1] if read else []), logit_rows]
            outputs[0].type.tensor_type.shape.dim[0].dim_param = "R"
        hand_on_words(self.nodes, (info.name for info in outputs))
        if any(DECODING in node.input for node in self.nodes):
            inputs.append(helper.make_tensor_value_info(DECODING, TensorProto.INT64, [1]))
        model = helper.make_model(
            helper.make_graph(self.nodes, "llmc", inputs, outputs, list(self.initializers.values())),
            opset_imports=[
                helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1),
                *([helper.make_opsetid(OWN, 1)] if self.options.panels else []),
            ],
            ir_version=IR_VERSION, producer_name="llmc",
        )  # fmt: skip
        short = shorten(model)
        recipes = [replace(r, name=short.get(r.name, r.name)) for r in self.recipes]
        tables = {short[v.name]: t for v, t in self.graph.tables.items() if v.name in self.initializers}
        folded = {short[data]: short.get(offsets, offsets) for data, offsets in self.folded.items()}
        return OnnxGraph(model, recipes, tables, folded)

    def _info(self, value: Value, name: str) -> ValueInfoProto:
        return helper.make_tensor_value_info(name, ONNX_TYPES[value.dtype], list(value.shape))

    def _rename(self, old: str, new: str) -> None:
        for node in self.nodes:
            for names in (node.input, node.output):
                for i, name in enumerate(names):
                    if name == old:
                        names[i] = new

    def _embedding(self, node: Node) -> None:
        weight, ids = node.value(0), self.name(node.inputs[1])
        rows, width = (int(d) for d in weight.shape)
        sources = [self.graph.weights[weight]]
        # the format of lm_head, which it is tied to
        held = self.options.format(sources, width, normed=True, lm_head=True) if self.options.block else None
        if held is None or (width % held.block and not self.options.panels):
            self.add("Gather", [self.name(weight), ids], [node.out.name])
            return
        if self.options.panels:
            panels = self._panels(sources, (rows, width), held, "panels")
            self.add("Embedding", [ids, panels], [node.out.name], OWN, **_matrix(rows, width, held))
            return
        out = f"{node.out.name}_codes" if held.offsets else node.out.name
        data, scales = self._blocks(sources, rows, width, held, as_rows=True)
        self.add(
            "GatherBlockQuantized", [data, ids, scales], [out], MICROSOFT,
            bits=held.bits, block_size=held.block, gather_axis=0, quantize_axis=1,
        )  # fmt: skip
        if held.offsets:
            blocks, stem = width // held.block, node.out.name
            recipe = self._part(sources, held, "offsets")
            self.add("Gather", [self.external(recipe, TensorProto.FLOAT, (rows, blocks)), ids], [f"{stem}_rows"])
            self.add("Unsqueeze", [f"{stem}_rows", self.const([-1])], [f"{stem}_offsets"])
            shape = self.const([0, 0, blocks, held.block])
            self.add("Reshape", [out, shape], [f"{stem}_blocks"])
            self.add("Add", [f"{stem}_blocks", f"{stem}_offsets"], [f"{stem}_sums"])
            self.add("Reshape", [f"{stem}_sums", self.const([0, 0, width])], [node.out.name])

    def _part(self, sources: list[str], held: MatrixFormat, part: str) -> Recipe:
        name, transform = f"{'+'.join(sources)}.{held.family}_{part}", f"{held.family}_{part}"
        return Recipe(name, transform, tuple(sources), held.block, held.reordered)

    def _blocks(
        self, sources: list[str], rows: int, width: int, held: MatrixFormat, as_rows: bool = False
    ) -> tuple[str, str]:
        blocks = -(-width // held.block)
        size = held.block * held.bits // 8
        shape = (rows, blocks * size) if as_rows else (rows, blocks, size)
        recipe = self._part(sources, held, "rows" if as_rows else "data")
        data = self.external(recipe, TensorProto.UINT8, shape)
        return data, self.external(self._part(sources, held, "scales"), TensorProto.FLOAT, (rows, blocks))

    def _linear(self, node: Node) -> None:
        count = len(node.attrs.get("parts", [0]))
        weights = [v for v in node.inputs[1 : 1 + count] if v is not None]
        if weights[0] not in self.graph.weights:
            self._computed_linear(node)
            return
        biases = [v for v in node.inputs[1 + count :] if v is not None]
        sources = [self.graph.weights[w] for w in weights]
        rows, width = sum(int(w.shape[0]) for w in weights), int(weights[0].shape[1])
        lm_head = len(node.out.shape) == 2 and count == 1
        if self.options.block and not stay_floats(sources, self.options.stored):
            self._quantised_linear(node, weights, biases, lm_head and node.out is self.graph.outputs[0][1])
            return
        x, bias = self.name(node.inputs[0]), self._bias(biases, rows)
        out = f"{node.out.name}_product" if biases else node.out.name
        if lm_head:
            self.add("Gemm", [x, self.dense(weights[0])], [out], transB=1)  # shares its copy with the embedding
        else:
            recipe = Recipe("+".join(sources) + ".T", "transposed", tuple(sources))
            self.add("MatMul", [x, self.external(recipe, TensorProto.FLOAT, (width, rows))], [out])
        if biases:
            self.add("Add", [out, bias], [node.out.name])

    def _bias(self, biases: list[Value], rows: int) -> str:
        """The name of the concatenated biases; "" for none."""
        names = [self.graph.weights[b] for b in biases]
        recipe = Recipe("+".join(names), "dense", tuple(names))
        return self.external(recipe, TensorProto.FLOAT, (rows,)) if names else ""

    def _quantised_linear(self, node: Node, weights: list[Value], biases: list[Value], lm_head: bool) -> None:
        """One matmul with all matrices, or one with each run of equal bits."""
        sources, width = [self.graph.weights[w] for w in weights], int(weights[0].shape[1])
        normed, gated = node.inputs[0] in self.normed, node.op == "gated_linear"
        runs = [len(sources)] if gated else self.options.runs(sources, width, normed, lm_head)
        outs, at = [], 0
        for i, count in enumerate(runs):
            each = slice(at, at := at + count)
            outs.append(node.out.name if len(runs) == 1 else f"{node.out.name}_{i}")
            rows, x = sum(int(w.shape[0]) for w in weights[each]), self.name(node.inputs[0])
            held = self.options.format(sources[each], width, normed, lm_head)
            if held.order:
                x = self.add("Gather", [x, self.const(held.order)], [f"{outs[i]}_in_order"], axis=-1)
            one = Matmul(x, outs[i], sources[each], rows, width, self._bias(biases[each], rows), held)
            if self.options.panels:
                self._own_matmul(one, gated, of_tokens=len(node.out.shape) == _OF_TOKENS)
            else:
                self._nbits(one, len(node.out.shape))
        if len(runs) > 1:
            self.add("Concat", outs, [node.out.name], axis=-1)

    def _computed_linear(self, node: Node) -> None:
        """A matrix computed by operators, such as a sum of two."""
        x, weight, *bias = (self.name(v) for v in node.inputs if v is not None)
        turned = self.add("Transpose", [weight], [f"{node.out.name}_turned"], perm=[1, 0])
        out = f"{node.out.name}_product" if bias else node.out.name
        self.add("MatMul", [x, turned], [out])
        if bias:
            self.add("Add", [out, *bias], [node.out.name])

    def _panels(self, sources: list[str], shape: tuple[int, int], held: MatrixFormat, part: str) -> str:
        family, part = f"p{held.family}", part_of(part, held)
        name = f"{'+'.join(sources)}.{family}_{part}"
        recipe = Recipe(name, f"{family}_{part}", tuple(sources), held.block, held.reordered)
        size = panel_bytes(*shape, held.block, held.bits, held.offsets)
        return self.external(recipe, TensorProto.UINT8, (size,))

    def _own_matmul(self, one: Matmul, gated: bool, of_tokens: bool) -> None:
        panels = self._panels(one.sources, (one.rows, one.width), one.held, "gated" if gated else "panels")
        names = [one.x, panels, one.bias, DECODING if of_tokens and self.options.prompts == BF16 else ""]
        while not names[-1]:
            names.pop()
        self.add(
            "Linear", names, [one.out, f"{one.out}_scratch"], OWN,
            **_matrix(one.rows, one.width, one.held), gated=int(gated),
        )  # fmt: skip

    def _nbits(self, one: Matmul, rank: int) -> None:
        held = one.held
        data, scales = self._blocks(one.sources, one.rows, one.width, held)
        folds = held.offsets and self.options.fold and held.block >= FOLDED_BLOCK
        apart = held.offsets and not folds
        out = f"{one.out}_codes" if apart else one.out
        self.add(
            "MatMulNBits", [one.x, data, scales, *(["", "", one.bias] if one.bias else [])], [out], MICROSOFT,
            K=one.width, N=one.rows, bits=held.bits, block_size=held.block,
            accuracy_level=_INT8 if self.options.activations else _FLOAT32,
        )  # fmt: skip
        if folds:
            recipe = self._part(one.sources, held, "offsets")
            self.recipes.extend([recipe] if recipe not in self.recipes else [])
            self.folded[data] = recipe.name
        elif apart:
            self._add_offsets(one, rank)

    def _add_offsets(self, one: Matmul, rank: int) -> None:
        """blocksum(x) · offsetsᵀ, added to the quantized matmul."""
        held, stem, blocks = one.held, one.out, -(-one.width // one.held.block)
        if one.width % held.block:
            raise CompileError(f"{'+'.join(one.sources)}: its {one.width} inputs do not fill blocks of {held.block}")
        keep = self.const([0] * (rank - 1) + [blocks, held.block])
        self.add("Reshape", [one.x, keep], [f"{stem}_blocks"])
        self.add("ReduceSum", [f"{stem}_blocks", self.const([-1])], [f"{stem}_sums"], keepdims=0)
        recipe = self._part(one.sources, held, "columns")
        columns = self.external(recipe, TensorProto.FLOAT, (blocks, one.rows))
        self.add("MatMul", [f"{stem}_sums", columns], [f"{stem}_offsets"])
        self.add("Add", [f"{stem}_codes", f"{stem}_offsets"], [stem])

    def _rms_norm(self, node: Node) -> None:
        """Of one input, or of the sum of two, which is the second output."""
        self.normed.add(node.out)
        names, outputs, eps = [self.name(v) for v in node.inputs], [o.name for o in node.outputs], node.attrs["eps"]
        if self.options.panels:
            added = names if len(outputs) == 2 else [names[0], "", names[1]]
            self.add("AddNorm", added, outputs, OWN, eps=eps)
        elif len(outputs) == 2:
            outputs[1:1] = ["", ""]
            self.add("SkipSimplifiedLayerNormalization", names, outputs, MICROSOFT, epsilon=eps)
        else:
            self.add("SimplifiedLayerNormalization", names, outputs, axis=-1, epsilon=eps, stash_type=1)

    def _gqa(self, node: Node) -> None:
        if not self.options.panels:
            emit_attention(self, node)
            return
        attrs = node.attrs
        require_heads(attrs)
        q, k, v, past_k, past_v, _, cos, sin = (self.name(x) for x in node.inputs[:8])
        sinks, slopes = (self.name(node.optional(at)) for at in (8, 9))
        if attrs.get("slopes"):
            slopes = self.const(attrs["slopes"], np.float32)
        more = [cos, sin, sinks, slopes]
        while more and not more[-1]:
            more.pop()
        self.add(
            _ATTENTION[self.options.cache][0], [q, k, v, past_k, past_v, ROWS, *more],
            [*(o.name for o in node.outputs), f"{node.out.name}_scratch"], OWN,
            heads=attrs["heads"], kv_heads=attrs["kv_heads"], head_dim=attrs["head_dim"],
            value_dim=attrs.get("value_dim", attrs["head_dim"]), window=max(0, attrs["window"]), scale=attrs["scale"],
            softcap=float(attrs["softcap"]),
        )  # fmt: skip

    def _last_rows(self, node: Node) -> None:
        self.shared["last_rows"] = LOGIT_ROWS
        hidden = node.value(0)
        flat = f"{node.out.name}_flat"
        self.add("Reshape", [self.name(hidden), self.const([-1, *hidden.shape[2:]])], [flat])
        self.add("Gather", [flat, LOGIT_ROWS], [node.out.name], axis=0)

    def _split(self, node: Node) -> None:
        parts = self.const(node.attrs["parts"])
        self.add("Split", [self.name(node.inputs[0]), parts], [o.name for o in node.outputs], axis=-1)

    def _reshape(self, node: Node) -> None:
        source = node.value(0)
        shape = [0 if i < len(source.shape) and d == source.shape[i] else d for i, d in enumerate(node.out.shape)]
        unknown = [i for i, d in enumerate(shape) if isinstance(d, str)]
        target = [-1 if isinstance(d, str) else d for d in shape]
        form = self.const(target) if len(unknown) < 2 else self.sizes(node.out.shape)
        self.add("Reshape", [self.name(source), form], [node.out.name])


_OF_TOKENS = 3
"""Rank of values of all tokens in a step; gathered values have rank 2."""
_INT8, _FLOAT32 = 4, 1
"""Compute types of MatMulNBits (its accuracy_level)."""
_FUSED = {
    "experts": emit_experts, "expert_linear": emit_expert_linear, "scaled_dot_product_attention": emit_whole_attention,
    "adapted": emit_adapted,
    "embedding": _Model._embedding, "linear": _Model._linear, "gated_linear": _Model._linear,
    "rms_norm": _Model._rms_norm, "skip_rms_norm": _Model._rms_norm, "gqa": _Model._gqa,
    "last_rows": _Model._last_rows, "split": _Model._split, "reshape": _Model._reshape, "view": _Model._reshape,
    "flatten": _Model._reshape, "unflatten": _Model._reshape, "squeeze": _Model._reshape,
}  # fmt: skip


def _matrix(rows: int, width: int, held: MatrixFormat) -> dict[str, int]:
    return {
        "rows": rows, "width": width, "group": held.block, "bits": held.bits, "offsets": held.beside,
        "table": TABLES.index(held.table),
    }  # fmt: skip
