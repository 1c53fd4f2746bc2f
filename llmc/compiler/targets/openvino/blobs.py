"""Compiled models without weights: what OpenVINO's CPU plugin opens without rewriting the model first.

`compile_model` rewrites a model into the plugin's own operators, and `export_model` writes the result with its
constants. Here every constant is moved into one weights file, each content once, whatever the plugin made of it on the
way (a converted scale, a folded reshape): OpenVINO's own weightless export leaves those in the blob, and fails at
import where a constant's type was changed. Names that count what the process made before become numbers, so that equal
models give equal bytes. Models with paged attention cannot be imported in 2026.4 (finish.py).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import openvino as ov

from llmc.compiler.targets.openvino.finish import FinishedWeights
from llmc.errors import CompileError
from llmc.runtime.executors.openvino.blobs import CpuBlob

_LAYER = re.compile(r'<layer id="(\d+)" name="([^"]*)"')
_CONSTANT = re.compile(
    r'(<layer id="\d+" name="[^"]*" type="Const"[^>]*>\s*<data element_type="(\w+)" [^>]*?)'
    r'offset="(\d+)" size="(\d+)" ?/>(\s*<rt_info>)?'
)
_NOTES = re.compile(r'\s*<attribute name="(?:fused_names|WeightlessCacheAttribute)"[^>]*/>')
_EMPTY_NOTES = re.compile(r"\s*<rt_info>\s*</rt_info>")
_TYPES = {
    "f32": "FP32", "f16": "FP16", "bf16": "BF16", "i64": "I64", "i32": "I32", "i8": "I8", "u8": "U8", "i4": "I4",
    "u4": "U4", "boolean": "BOOL",
}  # fmt: skip
"""A constant's type in the model's XML, and in its WeightlessCacheAttribute."""


def weightless(model: ov.Model, properties: Mapping[str, Any], weights: FinishedWeights) -> bytes:
    """`model` compiled for this CPU, its constants in `weights`; open_blob (runtime/executors/openvino) opens it.

    Raises CompileError when OpenVINO cannot compile the model, or exports something else than expected.
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
    """The model's XML with its constants in `weights`; layers have their numbers for names, but for those `kept`."""
    xml = _EMPTY_NOTES.sub("", _NOTES.sub("", blob.model.decode()))

    def moved(match: re.Match[str]) -> str:
        head, kind, offset, size = match[1], match[2], int(match[3]), int(match[4])
        if kind == "dynamic" and size <= 1:  # an input that is absent
            return f'{head}offset="0" size="{size}" />{match[5] or ""}'
        if kind not in _TYPES:
            raise CompileError(f"OpenVINO holds a constant as {kind}, which llmc does not know")
        at = weights.place(blob.constants[offset : offset + size])
        note = (
            f'<rt_info><attribute name="WeightlessCacheAttribute" version="0" original_dtype="{_TYPES[kind]}" '
            f'bin_offset="{at}" original_size="{size}" />'
        )
        return f'{head}offset="0" size="0" />{note}{"" if match[5] else "</rt_info>"}'

    xml, count = _CONSTANT.subn(moved, xml)
    written = xml.count('type="Const"')
    if count != written:
        raise CompileError(f"OpenVINO wrote {written} constants, {count} of them as expected")
    return _LAYER.sub(lambda m: m[0] if m[2] in kept else f'<layer id="{m[1]}" name="l{m[1]}"', xml)


def _same(data: bytes) -> bytes:
    return data
