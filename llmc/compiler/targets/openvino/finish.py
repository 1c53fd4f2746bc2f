"""Compiles models ahead of time with OpenVINO's CPU plugin, which halves the time to open them.

`compile_model` first rewrites a model into the plugin's own operators (compressed matmuls, fused rotary embedding and
norms), and then creates primitives. The rewriting depends only on the OpenVINO version and the instruction set, and
`export_model` serialises its result. llmc does it when the bundle is compiled: it extracts the rewritten model from the
export, and moves its constants into one weights file, each content once.

The exported stream, as OpenVINO 2026.4 writes it (src/plugins/intel_cpu, serialize.cpp):

    stream = metadata header custom constants model          positions in the header count from its first byte
    header = custom_offset custom_size constants_offset constants_size model_offset model_size      uint64 each
    model  = the IR's XML, passed through CACHE_ENCRYPTION_CALLBACKS

OpenVINO refuses to import such a stream of a paged model (2026.4 loses PagedAttentionExtension's head counts). The XML
is therefore read as a model, given the heads again, and compiled.

Scales of compiled models keep the 16 bits that hold them exactly, as those of most checkpoints do. OpenVINO's own
rewriting converts scales to float32. Its compressed matmuls read scales in any float type and pack them in float32, so
the file needs no more bits than the checkpoint. device.py keeps them so when a model is opened.

`weightless` builds compiled models without weights, which the CPU plugin opens without rewriting. It moves every
constant of the export into one weights file, each content once, in the plugin's form (a converted scale, a folded
reshape). OpenVINO's own weightless export leaves such constants in the blob, and fails at import where a constant's
type was changed. Names that count the process's earlier objects become numbers, so that equal models give equal bytes.
Models with paged attention cannot be imported in 2026.4.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import openvino as ov

from llmc.compiler.weights.recipes import Sink
from llmc.errors import CompileError
from llmc.runtime.executors.openvino.blobs import CpuBlob
from llmc.runtime.executors.openvino.device import PRODUCT, SCALES

_KINDS = re.compile(r'<layer id="(\d+)" name="[^"]*" type="(\w+)"')
_EDGE = re.compile(r'<edge from-layer="(\d+)" from-port="\d+" to-layer="(\d+)" to-port="(\d+)"')


def scales_of(xml: str) -> tuple[frozenset[str], frozenset[str]]:
    """Find the layers of a compiled model that output only scales: of matmuls, and of look-ups.

    A look-up's result has the type of its scales.
    """
    kinds = dict(_KINDS.findall(xml))
    read = [(kinds[to], source) for source, to, port in _EDGE.findall(xml) if port == str(SCALES)]
    looked_up = frozenset(source for kind, source in read if kind == "GatherCompressed")
    return frozenset(source for kind, source in read if kind == PRODUCT) - looked_up, looked_up


def narrowed(data: memoryview) -> tuple[str, str, memoryview]:
    """Narrow float32 numbers to float16 or bfloat16 where that is exact: the type's two names in OpenVINO's XML, and
    bytes.
    """
    values = np.frombuffer(data, np.float32)
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    if np.array_equal(half, values):
        return "f16", "FP16", half.view(np.uint8).data
    bits = values.view(np.uint32)
    if not (bits & 0xFFFF).any():
        return "bf16", "BF16", (bits >> 16).astype(np.uint16).view(np.uint8).data
    return "f32", "FP32", data


_HEADER = struct.Struct("<6Q")
_LONGEST_METADATA = 1 << 16
_LAYER = re.compile(r'<layer id="(\d+)" name="([^"]*)" type="(\w+)"')
_CONSTANT = re.compile(
    r'(<layer id="(\d+)" name="[^"]*" type="Const"[^>]*>\s*<data element_type=)"(\w+)" shape="([^"]*)" '
    r'offset="(\d+)" size="(\d+)"(.*?precision=)"(\w+)"',
    re.DOTALL,
)
_NOTES = re.compile(r'\s*<attribute name="(?:fused_names|WeightlessCacheAttribute)"[^>]*/>')
_EMPTY_NOTES = re.compile(r"\s*<rt_info>\s*</rt_info>")
PAGE = 4096
SMALL = 64
"""Alignment in bytes of small constants; others are aligned to a page, so that matrices can be mapped."""


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
    """Return the XML of `model` in the CPU plugin's own operators, with its constants in `weights`.

    Raises CompileError when OpenVINO cannot compile the model, or exports an unexpected form.
    """
    exported: list[bytes] = []

    def keep(xml: bytes) -> bytes:
        exported.append(xml)
        return xml

    plain = {"CACHE_ENCRYPTION_CALLBACKS": [keep, lambda data: data]}
    try:
        stream: Any = ov.Core().compile_model(model, "CPU", {**properties, **plain}).export_model()
    except RuntimeError as e:
        raise CompileError(f"OpenVINO cannot compile the model: {_brief(e)}") from e
    data = memoryview(stream.getvalue())
    if len(exported) != 1:
        raise CompileError(f"OpenVINO {ov.__version__} exported {len(exported)} models in place of one")
    xml = _placed(exported[0].decode(), _constants(data, exported[0]), weights)
    xml = _EMPTY_NOTES.sub("", _NOTES.sub("", xml))
    return renamed(xml, frozenset(parameter.get_friendly_name() for parameter in model.get_parameters()))


def _placed(xml: str, constants: memoryview, weights: FinishedWeights) -> str:
    """The XML with its constants in `weights`, scales in the fewest bits that hold them."""
    scales, looked_up = scales_of(xml)
    held = {m[2]: constants[int(m[5]) : int(m[5]) + int(m[6])] for m in _CONSTANT.finditer(xml)}
    shared = [held[layer] for layer in looked_up]  # a tied lm_head shares the embedding's scales, once in the file

    def placed(match: re.Match[str]) -> str:
        head, layer, kind, shape, _, _, middle, precision = match.groups()
        data = held[layer]
        if layer in scales and kind == "f32" and data not in shared:
            kind, precision, data = narrowed(data)
        at = weights.append(data)
        return f'{head}"{kind}" shape="{shape}" offset="{at}" size="{len(data)}"{middle}"{precision}"'

    return _CONSTANT.sub(placed, xml)


def renamed(xml: str, kept: frozenset[str]) -> str:
    """Replace layer names, which depend on the process's earlier work, by numbers, except for names that are
    looked up.
    """

    def rename(match: re.Match[str]) -> str:
        number, name, kind = match.groups()
        if kind == "Parameter" and name in kept:
            return match[0]
        return f'<layer id="{number}" name="l{number}" type="{kind}"'

    return _LAYER.sub(rename, xml)


def _constants(data: memoryview, xml: bytes) -> memoryview:
    """The constants of an exported stream."""
    for base in range(min(len(data) - _HEADER.size, _LONGEST_METADATA)):
        custom, _, offset, size, at, length = _HEADER.unpack_from(data, base)
        if custom == _HEADER.size and length == len(xml) and base + at + length == len(data) and offset + size <= at:
            return data[base + offset : base + offset + size]
    raise CompileError(f"OpenVINO {ov.__version__} exports a model in another form than llmc knows")


def _brief(error: RuntimeError) -> str:
    lines = [line for line in str(error).splitlines() if line and not line.startswith("Exception from")]
    return " ".join(lines)[:500]


_NUMBERED = re.compile(r'<layer id="(\d+)" name="([^"]*)"')
_OWN_CONSTANT = re.compile(
    r'(<layer id="\d+" name="[^"]*" type="Const"[^>]*>\s*<data element_type="(\w+)" [^>]*?)'
    r'offset="(\d+)" size="(\d+)" ?/>(\s*<rt_info>)?'
)
_TYPES = {
    "f32": "FP32", "f16": "FP16", "bf16": "BF16", "i64": "I64", "i32": "I32", "i8": "I8", "u8": "U8", "i4": "I4",
    "u4": "U4", "boolean": "BOOL",
}  # fmt: skip
"""Constant types in the model's XML, and in its WeightlessCacheAttribute."""


def weightless(model: ov.Model, properties: Mapping[str, Any], weights: FinishedWeights) -> bytes:
    """Compile `model` for this CPU, with its constants in `weights`; runtime/executors/openvino opens it with
    open_blob.

    Raises CompileError when OpenVINO cannot compile the model, or exports an unexpected form.
    """
    plain = {"CACHE_ENCRYPTION_CALLBACKS": [_same, _same]}
    try:
        stream: Any = ov.Core().compile_model(model, "CPU", {**properties, **plain}).export_model()
        blob = CpuBlob.parse(stream.getvalue())
    except RuntimeError as e:
        reason = " ".join(line for line in str(e).splitlines() if line and not line.startswith("Exception from"))
        raise CompileError(f"OpenVINO cannot compile the model: {reason[:500]}") from e
    except ValueError as e:
        raise CompileError(f"OpenVINO {ov.__version__} exports a model in another form than llmc knows: {e}") from e
    named = {node.get_friendly_name() for node in (*model.get_parameters(), *model.get_results())}
    return blob.with_model(_moved(blob, weights, named).encode())


def _moved(blob: CpuBlob, weights: FinishedWeights, kept: Collection[str]) -> str:
    """The model's XML with its constants in `weights`, and layers named by number, except for those `kept`."""
    xml = _EMPTY_NOTES.sub("", _NOTES.sub("", blob.model.decode()))

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

    xml, count = _OWN_CONSTANT.subn(moved, xml)
    written = xml.count('type="Const"')
    if count != written:
        raise CompileError(f"OpenVINO wrote {written} constants, {count} of them as expected")
    return _NUMBERED.sub(lambda m: m[0] if m[2] in kept else f'<layer id="{m[1]}" name="l{m[1]}"', xml)


def _same(data: bytes) -> bytes:
    return data
