"""Scales of finished models in the 16 bits that hold them exactly, as those of most checkpoints do.

OpenVINO's own rewriting turns scales into float32. Its compressed products read them in any float type and pack them in
float32, so that a file needs no more bits than the checkpoint had. device.py keeps them so when a model is opened.
"""

from __future__ import annotations

import re

import numpy as np

from llmc.runtime.executors.openvino.device import PRODUCT, SCALES

_LAYER = re.compile(r'<layer id="(\d+)" name="[^"]*" type="(\w+)"')
_EDGE = re.compile(r'<edge from-layer="(\d+)" from-port="\d+" to-layer="(\d+)" to-port="(\d+)"')


def scales_of(xml: str) -> tuple[frozenset[str], frozenset[str]]:
    """Layers of a finished model whose output is the scales of products alone, and of look-ups, whose result has the
    type of their scales."""
    kinds = dict(_LAYER.findall(xml))
    read = [(kinds[to], source) for source, to, port in _EDGE.findall(xml) if port == str(SCALES)]
    looked_up = frozenset(source for kind, source in read if kind == "GatherCompressed")
    return frozenset(source for kind, source in read if kind == PRODUCT) - looked_up, looked_up


def narrowed(data: memoryview) -> tuple[str, str, memoryview]:
    """Float32 numbers in the type that holds each exactly, float16, bfloat16 or float32: its two names in OpenVINO's
    XML, and the bytes."""
    values = np.frombuffer(data, np.float32)
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    if np.array_equal(half, values):
        return "f16", "FP16", half.view(np.uint8).data
    bits = values.view(np.uint32)
    if not (bits & 0xFFFF).any():
        return "bf16", "BF16", (bits >> 16).astype(np.uint16).view(np.uint8).data
    return "f32", "FP32", data
