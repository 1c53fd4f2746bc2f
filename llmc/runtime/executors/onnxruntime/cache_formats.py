"""What graphs for ONNX Runtime keep keys and values in, by a manifest's option `kv_cache_dtype`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from llmc.runtime.cache_shape import SCALE_BYTES, CacheShape
from llmc.runtime.executors.onnxruntime.coded_cache import CodedTensors
from llmc.runtime.executors.onnxruntime.rounded_cache import RoundedTensors
from llmc.runtime.executors.slot_tensors import Tensors

if TYPE_CHECKING:
    from llmc.runtime.bundle import Bundle


class CacheFormat(NamedTuple):
    """One: the elements of arrays and how ONNX Runtime calls their type, what holds them, elements of a line beside its
    numbers, and the narrowest type in which these travel exactly."""

    dtype: type
    onnx_type: str
    tensors: type[Tensors] = Tensors
    beside: int = 0
    exact: str = "f32"


FLOATS = CacheFormat(np.float32, "tensor(float)")
FORMATS = {
    "f16": CacheFormat(np.float16, "tensor(float16)", exact="f16"),
    "bf16": CacheFormat(np.uint16, "tensor(uint16)", RoundedTensors, exact="bf16"),
    "int8": CacheFormat(np.uint8, "tensor(uint8)", CodedTensors, SCALE_BYTES),
}


def format_of(bundle: Bundle) -> CacheFormat:
    """The one of a bundle's graphs; float32 where its manifest names none."""
    return FORMATS.get(str(bundle.manifest.options.get("kv_cache_dtype")), FLOATS)


def lines_of(bundle: Bundle) -> CacheShape:
    """A bundle's cache as its graphs hold it: with keys and values as wide as lines."""
    shape, beside = bundle.cache_shape, format_of(bundle).beside
    if not beside:
        return shape
    wide = (replace(t, shape=(t.shape[0], t.shape[1] + beside)) if t.kind == "kv" else t for t in shape)
    return CacheShape(shape.layers, tuple(wide))
