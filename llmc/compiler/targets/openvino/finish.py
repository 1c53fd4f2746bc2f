"""Compiles models ahead of time with OpenVINO's CPU plugin, which halves the time to open them.

`compile_model` first rewrites a model into the plugin's own operators (compressed matmuls, fused rotary embedding and
norms), and then creates primitives. The rewriting depends only on the OpenVINO version and the instruction set, and
`export_model` serialises its result (runtime/executors/openvino/blobs.py has the format). llmc does it when the bundle
is compiled, and moves the constants of the export into one weights file, each content once. Names that count the
process's earlier objects become numbers, so that equal models give equal bytes.

`finish` is for paged models, whose export OpenVINO refuses to import (2026.4 loses PagedAttentionExtension's head
counts). The XML is therefore read as a model, given the heads again, and compiled. Its scales keep the 16 bits that
hold them exactly, as those of most checkpoints do. OpenVINO's own rewriting converts scales to float32. Its compressed
matmuls read scales in any float type and pack them in float32, so the file needs no more bits than the checkpoint.
device.py keeps them so when a model is opened.

`weightless` builds compiled models without weights, which the CPU plugin opens without rewriting, with constants in the
plugin's form (a converted scale, a folded reshape). OpenVINO's own weightless export leaves such constants in the blob,
and fails at import where a constant's type was changed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import openvino as ov

from llmc.compiler.targets.openvino.formats import replace_constants
from llmc.compiler.weights.recipes import Sink
from llmc.errors import CompileError
from llmc.runtime.executors.openvino.blobs import UNCHANGED, CpuBlob, reason_of
from llmc.runtime.executors.openvino.device import PRODUCT, SCALES

PAGE = 4096
SMALL = 64
"""Alignment in bytes of small constants; others are aligned to a page, so that matrices can be mapped."""
_EDGE = re.compile(r'<edge from-layer="(\d+)" from-port="\d+" to-layer="(\d+)" to-port="(\d+)"')
_LAYER = re.compile(r'<layer id="(\d+)" name="([^"]*)" type="(\w+)"')
_CONSTANT = re.compile(
    r'(<layer id="(\d+)" name="[^"]*" type="Const"[^>]*>\s*<data element_type=)"(\w+)" shape="([^"]*)" '
    r'offset="(\d+)" size="(\d+)"(.*?precision=)"(\w+)"',
    re.DOTALL,
)
_OWN_CONSTANT = re.compile(
    r'(<layer id="\d+" name="[^"]*" type="Const"[^>]*>\s*<data element_type="(\w+)" [^>]*?)'
    r'offset="(\d+)" size="(\d+)" ?/>(\s*<rt_info>)?'
)
_NOTES = re.compile(r'\s*<attribute name="(?:fused_names|WeightlessCacheAttribute)"[^>]*/>')
_EMPTY_NOTES = re.compile(r"\s*<rt_info>\s*</rt_info>")
_TYPES = {
    "f32": "FP32", "f16": "FP16", "bf16": "BF16", "i64": "I64", "i32": "I32", "i8": "I8", "u8": "U8", "i4": "I4",
    "u4": "U4", "boolean": "BOOL",
}  # fmt: skip
"""Constant types in the model's XML, and in its WeightlessCacheAttribute."""


class FinishedWeights:
    """The weights file of compiled models: constants by content, in the order of their first use."""

    def __init__(self, out: Sink) -> None:
        self._out = out
        self._end = 0
        self._placed: dict[bytes, int] = {}

    def append(self, data: memoryview) -> int:
        """Return the offset of a constant's bytes, and write them if they are new."""
        content = hashlib.sha256(data).digest()
        if content not in self._placed:
            alignment = PAGE if len(data) >= PAGE else SMALL
            start = -(-self._end // alignment) * alignment
            self._out.write(b"\0" * (start - self._end))
            self._out.write(data)
            self._placed[content], self._end = start, start + len(data)
        return self._placed[content]


def finish(model: ov.Model, properties: Mapping[str, str], weights: FinishedWeights) -> str:
    """Return the XML of `model` in the plugin's own operators, with constants in `weights`. Raises CompileError."""
    xml = _placed(_exported(model, properties), weights)
    return _renamed(_without_notes(xml), {parameter.get_friendly_name() for parameter in model.get_parameters()})


def weightless(model: ov.Model, properties: Mapping[str, Any], weights: FinishedWeights) -> bytes:
    """Compile `model` for this CPU to a stream for open_blob, with constants in `weights`. Raises CompileError."""
    blob = _exported(model, properties)
    xml = _moved(blob, _without_notes(blob.model.decode()), weights)
    named = {node.get_friendly_name() for node in (*model.get_parameters(), *model.get_results())}
    return blob.with_model(_renamed(xml, named).encode())


def _exported(model: ov.Model, properties: Mapping[str, Any]) -> CpuBlob:
    try:
        stream: Any = ov.Core().compile_model(model, "CPU", {**properties, **UNCHANGED}).export_model()
        return CpuBlob.parse(stream.getvalue())
    except RuntimeError as e:
        raise CompileError(f"OpenVINO cannot compile the model: {reason_of(e)}") from e
    except ValueError as e:
        raise CompileError(f"OpenVINO {ov.__version__} exports a model in another form than llmc knows: {e}") from e


def _without_notes(xml: str) -> str:
    return _EMPTY_NOTES.sub("", _NOTES.sub("", xml))


def _renamed(xml: str, kept: Collection[str]) -> str:
    """Replace layer names, which depend on earlier work, by numbers, except those of inputs and outputs in `kept`."""

    def rename(match: re.Match[str]) -> str:
        number, name, kind = match.groups()
        looked_up = kind in ("Parameter", "Result") and name in kept
        return match[0] if looked_up else f'<layer id="{number}" name="l{number}" type="{kind}"'

    return _LAYER.sub(rename, xml)


def _placed(blob: CpuBlob, weights: FinishedWeights) -> str:
    """The XML with its constants in `weights`, scales in the fewest bits that hold them."""
    xml = blob.model.decode()
    scales, looked_up = _scales_of(xml)
    held = {m[2]: blob.constants[int(m[5]) : int(m[5]) + int(m[6])] for m in _CONSTANT.finditer(xml)}
    shared = [held[layer] for layer in looked_up]  # a tied lm_head shares the embedding's scales, once in the file

    def placed(match: re.Match[str]) -> str:
        head, layer, kind, shape, _, _, middle, precision = match.groups()
        data = held[layer]
        if layer in scales and kind == "f32" and data not in shared:
            kind, precision, data = narrowed(data)
        at = weights.append(data)
        return f'{head}"{kind}" shape="{shape}" offset="{at}" size="{len(data)}"{middle}"{precision}"'

    return _CONSTANT.sub(placed, xml)


def _scales_of(xml: str) -> tuple[frozenset[str], frozenset[str]]:
    """Layers that output only scales: of matmuls, and of look-ups, whose results have the type of their scales."""
    kinds = {number: kind for number, _, kind in _LAYER.findall(xml)}
    read = [(kinds[to], source) for source, to, port in _EDGE.findall(xml) if port == str(SCALES)]
    looked_up = frozenset(source for kind, source in read if kind == "GatherCompressed")
    return frozenset(source for kind, source in read if kind == PRODUCT) - looked_up, looked_up


def narrowed(data: memoryview) -> tuple[str, str, memoryview]:
    """Narrow float32 to float16 or bfloat16 where that is exact: the type's two names in XML, and bytes."""
    values = np.frombuffer(data, np.float32)
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    if np.array_equal(half, values):
        return "f16", "FP16", half.view(np.uint8).data
    bits = values.view(np.uint32)
    if not (bits & 0xFFFF).any():
        return "bf16", "BF16", (bits >> 16).astype(np.uint16).view(np.uint8).data
    return "f32", "FP32", data


def _moved(blob: CpuBlob, xml: str, weights: FinishedWeights) -> str:
    def moved(match: re.Match[str]) -> str:
        head, kind, offset, size = match[1], match[2], int(match[3]), int(match[4])
        if kind == "dynamic" and size <= 1:  # an absent input
            return f'{head}offset="0" size="{size}" />{match[5] or ""}'
        if kind not in _TYPES:
            raise CompileError(f"OpenVINO holds a constant as {kind}, which llmc does not know")
        at = weights.append(blob.constants[offset : offset + size])
        note = (
            f'<rt_info><attribute name="WeightlessCacheAttribute" version="0" original_dtype="{_TYPES[kind]}" '
            f'bin_offset="{at}" original_size="{size}" />'
        )
        return f'{head}offset="0" size="0" />{note}{"" if match[5] else "</rt_info>"}'

    return replace_constants(_OWN_CONSTANT, moved, xml)
