"""One .safetensors file, as views of the mapped file.

The safetensors package copies each tensor, and has no numpy type for bfloat16. Here float32 is a view, other floats are
converted directly into the caller's memory, and mapped pages can be released.

    file   = length:u64le header data
    header = JSON of `length` bytes: {name: {"dtype", "shape", "data_offsets": [begin, end]}…,
    "__metadata__"?}

Offsets count from the end of the header; tensors cover the data without gaps or overlaps. Source of the format and of
the header limit: https://huggingface.co/docs/safetensors (format section).
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llmc.compiler.checkpoint.base import FloatArray, MappedFile, require_finite, unknown_tensor

MAX_HEADER_BYTES = 100_000_000
MAX_RANK = 16
MAX_VALUES = 1 << 48
_LENGTH = struct.Struct("<Q")
_ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I64": 8, "I32": 4, "I16": 2,
    "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
_QUANTIZED = {"I64": "<i8", "I32": "<i4", "I8": "i1", "U8": "u1", "F8_E4M3": "u1", "F8_E8M0": "u1"}
"""Types of quantized tensors, which their formats read (quantised/)."""
_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's type and location; `begin` is its byte offset in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int


class SafetensorsFile:
    """A mapped file. Opening checks the whole header; only `tensor`, `fill` and `quantized` read data."""

    def __init__(self, path: Path) -> None:
        self._file = MappedFile(path)
        self.path = path
        self.tensors = _read_header(self._file)

    def tensor(self, name: str) -> FloatArray:
        """Finite float32 values in the stored shape; F32 is a read-only view. Raises CheckpointError."""
        stored = self._known(name)
        if not self.fills(name):
            raise self._file.error(
                f"tensor {name} has type {stored.dtype}, but only {', '.join(_FLOATS)} can be read; "
                "use the unquantized checkpoint and let `llmc compile --quantize` quantize it"
            )
        if stored.dtype == "F32":
            return require_finite(self._raw(stored), name, self.path)
        values = np.empty(stored.shape, np.float32)
        self.fill(name, values)
        return require_finite(values, name, self.path)

    def fills(self, name: str) -> bool:
        """Whether `fill` and `tensor` can read the tensor's type."""
        return self._known(name).dtype in _FLOATS

    def fill(self, name: str, out: FloatArray) -> None:
        """Write a tensor that `fills` into `out`, float32 of its shape and C-contiguous. Values are not checked."""
        stored = self._known(name)
        raw = self._raw(stored)
        if stored.dtype == "BF16":
            np.left_shift(raw, np.uint32(16), out=out.view(np.uint32), dtype=np.uint32)
        else:
            with np.errstate(over="ignore"):
                np.copyto(out, raw, casting="same_kind")

    def _raw(self, stored: StoredTensor) -> npt.NDArray[Any]:
        raw = np.frombuffer(self._file.buffer, _FLOATS[stored.dtype], math.prod(stored.shape), stored.begin)
        return raw.reshape(stored.shape)

    def forget(self) -> None:
        self._file.forget()

    def quantized(self, name: str) -> npt.NDArray[Any]:
        """A read-only view of integers, or of 8-bit floats' bytes, in the stored shape. Raises CheckpointError for
        other types."""
        stored = self._known(name)
        kind = _QUANTIZED.get(stored.dtype)
        if kind is None:
            raise self._file.error(
                f"tensor {name} has type {stored.dtype}, but quantized weights have one of {', '.join(_QUANTIZED)}"
            )
        raw = np.frombuffer(self._file.buffer, kind, math.prod(stored.shape), stored.begin)
        return raw.reshape(stored.shape)

    def _known(self, name: str) -> StoredTensor:
        stored = self.tensors.get(name)
        if stored is None:
            raise unknown_tensor(name, self.path, sorted(self.tensors))
        return stored


def _read_header(file: MappedFile) -> dict[str, StoredTensor]:
    length = int(file.unpack(_LENGTH, 0, "the header length")[0])
    if length > MAX_HEADER_BYTES:
        raise file.error(f"not a safetensors file, or damaged: it claims a header of {length} bytes")
    text = file.read(_LENGTH.size, length, "the header")
    try:
        header = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise file.error(f"damaged: its header is not valid JSON ({error}); fetch it again") from error
    if not isinstance(header, dict):
        raise file.error("damaged: its header is not a JSON object; fetch it again")
    header.pop("__metadata__", None)
    data, extents = _LENGTH.size + length, []
    tensors: dict[str, StoredTensor] = {}
    for name, entry in header.items():
        dtype, shape, begin, end = _entry(file, name, entry)
        extents.append((begin, end, name))
        tensors[name] = StoredTensor(dtype, shape, data + begin)
    position = 0
    for begin, end, name in sorted(extents):
        if begin != position:
            raise file.error(f"damaged: tensor {name} starts at {begin}, not {position}; fetch it again")
        position = end
    if data + position != file.size:
        raise file.error(f"truncated or damaged: {data + position} bytes expected, {file.size} found; fetch it again")
    return tensors


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a name occurs twice")
    return members


def _entry(file: MappedFile, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        item = _ITEM_BYTES[dtype]
    except (KeyError, TypeError, ValueError) as error:
        raise file.error(f"damaged or of a newer format: tensor {name!r} is {entry!r:.200}") from error
    if not all(type(value) is int and value >= 0 for value in (*shape, begin, end)):
        raise file.error(f"damaged: header entry of tensor {name!r} has a bad number: {entry!r:.200}")
    if len(shape) > MAX_RANK or math.prod(size or 1 for size in shape) > MAX_VALUES:
        raise file.error(f"damaged: tensor {name!r:.80} has shape {list(shape)!r:.200}, which is impossible")
    if math.prod(shape) * item != end - begin:
        raise file.error(f"damaged: tensor {name!r:.80} of {dtype} {list(shape)} cannot take {end - begin} bytes")
    return dtype, shape, begin, end
