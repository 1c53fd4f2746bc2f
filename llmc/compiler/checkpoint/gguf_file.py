"""GGUF files: their header (metadata and tensor locations), and the block types that keep their quantized weights.

    file  = "GGUF" version:u32 tensors:u64 pairs:u64 pair* info* padding data
    pair  = key:string type:u32 value
    array = type:u32 count:u64 value*                 string = length:u64 byte*
    info  = name:string dims:u32 dim:u64* type:u32 offset:u64

The first dim is the fastest; offset counts from data. All numbers are little-endian; data and offsets are aligned to
general.alignment (default 32). Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.

gguf.GGUFReader takes 2 s for a 49k vocabulary, this reader 0.02 s, because it does not decode arrays of strings
(`StringArray`). Every length is checked against the file size, so that a damaged header raises CheckpointError and
never causes a long loop or a large allocation.

Types with blocks of 32 weights and float16 scales:

    Q8_0   = scale (q:i8)*32
    Q4_0   = scale low          Q4_1 = scale minimum low
    Q5_0   = scale high low     Q5_1 = scale minimum high low
    IQ4_NL = scale low          low = (lo:4 hi:4)*16   high = (bit:1)*32

The low half-bytes are weights 0–15 of the block, the high ones 16–31. 5-bit weights and IQ4_NL's values are held in 8
bits. Types with 256 weights that share float16 numbers, in blocks of 16 or 32 with a small whole number each:

    Q2_K   = (scale:4 minimum:4)*16 codes:2*256 d:f16 dmin:f16
    Q3_K   = inverted_high:1*256 codes:2*256 scales:6*16 d:f16
    Q4_K   = d:f16 dmin:f16 (scale:6 minimum:6)*8 codes:4*256
    Q5_K   = d:f16 dmin:f16 (scale:6 minimum:6)*8 high:1*256 codes:4*256
    Q6_K   = codes:4*256 high:2*256 (scale:i8)*16 d:f16
    IQ4_XS = d:f16 high_scales:2*8 scales:4*8 codes:4*256

A block's scale is d times its number in float32, its minimum −dmin times its other number. Factors have 11 and at most
8 bits, so float32 holds the results exactly. Source: ggml's quants and gguf-py's.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from llmc.compiler.architectures.shared.block_form import BlockForm
from llmc.compiler.checkpoint.base import FloatArray, MappedFile

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MAX_NAME_BYTES = 65_535
MAX_DIMS = 4
MAX_PARTS = 10_000
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
"""Names of the parts of a split model (llama.cpp's llama-gguf-split)."""

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: struct.Struct("<B"), 1: struct.Struct("<b"), 2: struct.Struct("<H"), 3: struct.Struct("<h"), 4: _U32,
    5: struct.Struct("<i"), 6: struct.Struct("<f"), 7: struct.Struct("<?"), 10: _U64, 11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}  # fmt: skip

TENSOR_TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}  # fmt: skip
"""Type number: (name, weights per block, bytes per block), for the types that can be read."""


@dataclass(frozen=True)
class StringArray:
    """An array of strings with checked bounds, decoded on demand."""

    file: MappedFile
    offset: int
    count: int

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[str]:
        """Raises CheckpointError for a string that is not UTF-8."""
        position, buffer = self.offset, self.file.buffer
        for index in range(self.count):
            begin = position + 8
            position = begin + _U64.unpack_from(buffer, position)[0]
            try:
                yield buffer[begin:position].decode()
            except UnicodeDecodeError as error:
                raise self.file.error(f"damaged: string {index} of an array is not UTF-8; fetch it again") from error


@dataclass(frozen=True)
class TensorInfo:
    """Location of a tensor: `shape` is [rows, columns], `offset` counts bytes from the start of `file`."""

    file: MappedFile
    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


@dataclass(frozen=True)
class GgufHeader:
    """A checked header: every tensor lies inside the file, and no two overlap."""

    file: MappedFile
    metadata: dict[str, Any]
    """Scalars and strings as Python values, arrays of numbers as numpy views, arrays of strings as StringArray."""
    tensors: dict[str, TensorInfo]
    files: tuple[MappedFile, ...]
    """The parts of a split model, in order; else `file` alone."""

    def raw(self, info: TensorInfo) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return np.frombuffer(info.file.buffer, np.uint8, info.bytes, info.offset)


def is_gguf(path: Path) -> bool:
    """Whether the file begins with GGUF's magic; False if it cannot be read."""
    try:
        with path.open("rb") as stream:
            return stream.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def parts_of(path: Path) -> list[Path]:
    """The files of a split model, in order, if `path` is named like one of them; else `path` alone."""
    found = _PART.fullmatch(path.name)
    if found is None or not 1 <= int(found[3]) <= MAX_PARTS:
        return [path]
    return [path.with_name(f"{found[1]}-{i:05}-of-{found[3]}.gguf") for i in range(1, int(found[3]) + 1)]


def read_header(path: Path) -> GgufHeader:
    """Read and check the whole header, of all parts of a split model. Raises CheckpointError whatever they contain."""
    first, *others = (_read_part(part) for part in parts_of(path))
    stated = first.metadata.get("split.count", 1)
    if stated not in (0, len(others) + 1):
        raise first.file.error(
            f"one of {stated} parts of a split model; name the parts NAME-00001-of-{stated:05}.gguf and so on, in one "
            "folder"
            if isinstance(stated, int)
            else "damaged: split.count is not a number"
        )
    tensors = dict(first.tensors)
    for number, part in enumerate(others, 1):
        if part.metadata.get("split.no") != number or part.metadata.get("split.count") != stated:
            raise part.file.error(f"not part {number + 1} of the split model that {first.file.path.name} begins")
        if twice := tensors.keys() & part.tensors.keys():
            raise part.file.error(f"damaged: tensor {min(twice)} is in two parts of the split model; fetch it again")
        tensors |= part.tensors
    whole = first.metadata.get("split.tensors.count", len(tensors))
    if others and whole != len(tensors):
        raise first.file.error(f"damaged: the split model has {len(tensors)} tensors, not {whole}; fetch it again")
    return replace(first, tensors=tensors, files=(first.file, *(part.file for part in others)))


def _read_part(path: Path) -> GgufHeader:
    file = MappedFile(path)
    if file.read(0, min(4, file.size), "the magic") != MAGIC:
        raise file.error(f'not a GGUF file: it begins with {file.buffer[:4]!r}, not "GGUF"')
    version = int(file.unpack(_U32, 4, "the version")[0])
    if version not in VERSIONS:
        kind = "big-endian GGUF" if version & 0xFFFF == 0 and version else f"GGUF version {version}"
        raise file.error(f"{kind} is not supported (versions {VERSIONS}, little-endian); convert the model again")
    return _Reader(file).header()


class _Reader:
    def __init__(self, file: MappedFile) -> None:
        self.file, self.at = file, 8

    def header(self) -> GgufHeader:
        n_tensors, n_pairs = self._number(_U64), self._number(_U64)
        self._plausible(n_pairs, 13, "metadata entries")
        metadata: dict[str, Any] = {}
        for _ in range(n_pairs):
            key = self._name("a metadata key")
            if key in metadata:
                raise self.file.error(f"damaged: metadata key {key} occurs twice; fetch it again")
            metadata[key] = self._value(self._number(_U32), key)
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self.file.error(f"damaged: general.alignment is {alignment!r}, not a power of two")
        self._plausible(n_tensors, 25, "tensors")
        infos = [self._tensor() for _ in range(n_tensors)]
        return GgufHeader(self.file, metadata, self._placed(infos, alignment), (self.file,))

    def _number(self, layout: struct.Struct) -> int:
        value = self.file.unpack(layout, self.at, "a header field")[0]
        self.at += layout.size
        return int(value)

    def _plausible(self, count: int, least_bytes: int, what: str) -> None:
        self.file.need(self.at, count * least_bytes, f"a list of {count} {what}")

    def _name(self, what: str) -> str:
        length = self._number(_U64)
        if length > MAX_NAME_BYTES:
            raise self.file.error(f"damaged: {what} of {length} bytes at byte {self.at}; fetch it again")
        text = self.file.read(self.at, length, what)
        self.at += length
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            raise self.file.error(f"damaged: {what} is not UTF-8: {text!r:.80}; fetch it again") from error

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            length = self._number(_U64)
            text = self.file.read(self.at, length, f"the value of {key}")
            self.at += length
            return text.decode(errors="replace")
        if kind == _ARRAY:
            return self._array(key)
        layout = _SCALARS.get(kind)
        if layout is None:
            raise self.file.error(f"damaged or of a newer format: value of {key} has type {kind}")
        (value,) = self.file.unpack(layout, self.at, f"the value of {key}")
        self.at += layout.size
        return value

    def _array(self, key: str) -> Any:
        kind, count = self._number(_U32), self._number(_U64)
        if kind == _STRING:
            self._plausible(count, 8, f"strings in {key}")
            begin = position = self.at
            last, buffer = self.file.size - _U64.size, self.file.buffer
            for _ in range(count):
                if position > last:
                    break
                position += _U64.size + _U64.unpack_from(buffer, position)[0]
            self.file.need(begin, position - begin, f"the strings of {key}")
            self.at = position
            return StringArray(self.file, begin, count)
        layout = _SCALARS.get(kind)
        if layout is None:
            raise self.file.error(f"damaged or of a newer format: {key} is an array of type {kind}")
        self._plausible(count, layout.size, f"values in {key}")
        dtype = np.dtype("u1" if kind == 7 else layout.format)
        values = np.frombuffer(self.file.buffer, dtype, count, self.at)
        self.at += count * layout.size
        return values

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._name("a tensor name")
        n_dims = self._number(_U32)
        if not 1 <= n_dims <= MAX_DIMS:
            raise self.file.error(f"damaged: tensor {name!r} has {n_dims} dimensions; fetch it again")
        shape = tuple(self._number(_U64) for _ in range(n_dims))[::-1]
        return name, shape, self._number(_U32), self._number(_U64)

    def _placed(self, infos: list[tuple[str, tuple[int, ...], int, int]], alignment: int) -> dict[str, TensorInfo]:
        data = -(-self.at // alignment) * alignment
        placed: dict[str, TensorInfo] = {}
        for name, shape, kind, offset in infos:
            if kind not in TENSOR_TYPES:
                known = ", ".join(entry[0] for entry in TENSOR_TYPES.values())
                raise self.file.error(f"tensor {name} has quantisation type {kind}; supported: {known}")
            label, block, block_bytes = TENSOR_TYPES[kind]
            if name in placed or offset % alignment or shape[-1] % block or not all(shape):
                raise self.file.error(
                    f"damaged: tensor {name!r} ({label} {list(shape)} at {offset}) is a duplicate, "
                    f"misaligned or not whole blocks of {block}; fetch it again"
                )
            size = math.prod(shape) // block * block_bytes
            self.file.need(data + offset, size, f"tensor {name}")
            placed[name] = TensorInfo(self.file, name, label, shape, data + offset, size)
        end = data
        for info in sorted(placed.values(), key=lambda info: info.offset):
            if info.offset < end:
                raise self.file.error(f"damaged: tensor {info.name} overlaps another; fetch it again")
            if info.offset - end >= alignment:
                raise self.file.error(
                    f"damaged: {info.offset - end} bytes before tensor {info.name} belong to no tensor, so a type "
                    "or a shape is wrong; fetch it again"
                )
            end = info.offset + info.bytes
        return placed


BLOCK = 32
_SIGN = np.uint8(128)
FIVE_ZERO = 128 - 16
"""Added to 5-bit weights."""
_IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
IQ4_VALUES = _IQ4_VALUES.view(np.uint8) ^ _SIGN
"""The values of IQ4_NL's and IQ4_XS's 16 codes before their scale, with zero point 128."""
_STORED = 256
_TWO_ZERO = 8 - 2
"""Added to 2-bit weights."""
Bytes = npt.NDArray[np.uint8]
Parts: TypeAlias = "tuple[Bytes, FloatArray, FloatArray | None]"
"""Quantized weights, one per byte; the scale of each `form.block` of them; their minimums, or None without minimums."""


@dataclass(frozen=True)
class BlockType:
    """`stored` weights lie together; `zero` is the zero point of all; `split` decodes the bytes of a matrix, uint8
    [N, B, S]: N rows of B blocks of S bytes. Decoded parts are [N, B, ...], weights in order.

    Weights of fewer bits than `form.bits` are shifted to the middle of the wider range. Matmuls that quantize
    activations and add minimums separately are then as exact as the weights are small around that middle.
    """

    form: BlockForm
    stored: int
    zero: int
    split: Callable[[Bytes], Parts]


def planes(packed: Bytes, run: int, bits: int) -> Bytes:
    """Unpack numbers of `bits` bits, 8 / bits per byte: [N, B, S] → [N, B, S * 8 / bits]. `run` bytes hold the lowest
    bits of their first `run` numbers, the next bits hold the following `run` numbers."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    numbers = (packed.reshape(*packed.shape[:2], -1, 1, run) >> shifts) & np.uint8((1 << bits) - 1)
    return numbers.reshape(*packed.shape[:2], -1)


def halves(blocks: Bytes, at: int) -> FloatArray:
    """The float16 at byte `at` of every block, as float32 [N, B, 1]."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2").astype(np.float32)


def _q8_0(blocks: Bytes) -> Parts:
    return blocks[..., 2:] ^ _SIGN, halves(blocks, 0), None


def _q4_0(blocks: Bytes) -> Parts:
    return planes(blocks[..., 2:], 16, 4), halves(blocks, 0), None


def _q4_1(blocks: Bytes) -> Parts:
    return planes(blocks[..., 4:], 16, 4), halves(blocks, 0), halves(blocks, 2)


def _five(blocks: Bytes, at: int) -> Bytes:
    return (planes(blocks[..., at + 4 :], 16, 4) | planes(blocks[..., at : at + 4], 1, 1) << np.uint8(4)) + FIVE_ZERO


def _q5_0(blocks: Bytes) -> Parts:
    return _five(blocks, 2), halves(blocks, 0), None


def _q5_1(blocks: Bytes) -> Parts:
    return _five(blocks, 4), halves(blocks, 0), halves(blocks, 2)


def _iq4_nl(blocks: Bytes) -> Parts:
    return IQ4_VALUES[planes(blocks[..., 2:], 16, 4)], halves(blocks, 0), None


def _q2_k(blocks: Bytes) -> Parts:
    numbers = blocks[..., :16]
    scale = halves(blocks, 80) * (numbers & np.uint8(15))
    return planes(blocks[..., 16:80], 32, 2) + _TWO_ZERO, scale, -(halves(blocks, 82) * (numbers >> np.uint8(4)))


def _q3_k(blocks: Bytes) -> Parts:
    quantized = planes(blocks[..., 32:96], 32, 2) | planes(blocks[..., :32], 32, 1) << np.uint8(2)
    numbers = planes(blocks[..., 96:104], 8, 4) | planes(blocks[..., 104:108], 4, 2) << np.uint8(4)
    return quantized + (8 - 4), halves(blocks, 108) * _less_32(numbers), None


def _q4_k(blocks: Bytes) -> Parts:
    return planes(blocks[..., 16:], 32, 4), *_scales_and_minimums(blocks)


def _q5_k(blocks: Bytes) -> Parts:
    quantized = planes(blocks[..., 48:], 32, 4) | planes(blocks[..., 16:48], 32, 1) << np.uint8(4)
    return quantized + FIVE_ZERO, *_scales_and_minimums(blocks)


def _q6_k(blocks: Bytes) -> Parts:
    quantized = planes(blocks[..., :128], 64, 4) | planes(blocks[..., 128:192], 32, 2) << np.uint8(4)
    return quantized + (128 - 32), halves(blocks, 208) * blocks[..., 192:208].view(np.int8), None


def _iq4_xs(blocks: Bytes) -> Parts:
    numbers = planes(blocks[..., 4:8], 1, 4) | planes(blocks[..., 2:4], 1, 2) << np.uint8(4)
    return IQ4_VALUES[planes(blocks[..., 8:], 16, 4)], halves(blocks, 0) * _less_32(numbers), None


def _scales_and_minimums(blocks: Bytes) -> tuple[FloatArray, FloatArray]:
    """For Q4_K and Q5_K: 4 bytes of scales, 4 of minimums, and 4 with the low bits of both for the last 4 blocks."""
    scales, minimums, low = (blocks[..., at : at + 4] for at in (4, 8, 12))
    first, high = np.uint8(63), np.uint8(48)
    scale = np.concatenate([scales & first, low & np.uint8(15) | scales >> np.uint8(2) & high], axis=-1)
    minimum = np.concatenate([minimums & first, low >> np.uint8(4) | minimums >> np.uint8(2) & high], axis=-1)
    return halves(blocks, 0) * scale, -(halves(blocks, 2) * minimum)


def _less_32(numbers: Bytes) -> FloatArray:
    return numbers.astype(np.float32) - np.float32(32)


BLOCK_TYPES = {
    "Q8_0": BlockType(BlockForm("Q8_0", 8, BLOCK, ""), BLOCK, 128, _q8_0),
    "Q4_0": BlockType(BlockForm("Q4_0", 4, BLOCK, ""), BLOCK, 8, _q4_0),
    "Q4_1": BlockType(BlockForm("Q4_1", 4, BLOCK, "minimums"), BLOCK, 0, _q4_1),
    "Q5_0": BlockType(BlockForm("Q5_0", 8, BLOCK, "", stored_bits=5), BLOCK, 128, _q5_0),
    "Q5_1": BlockType(BlockForm("Q5_1", 8, BLOCK, "minimums", stored_bits=5), BLOCK, FIVE_ZERO, _q5_1),
    "IQ4_NL": BlockType(BlockForm("IQ4_NL", 8, BLOCK, "", stored_bits=4, table="iq4"), BLOCK, 128, _iq4_nl),
    "Q2_K": BlockType(BlockForm("Q2_K", 4, 16, "minimums", "float32", stored_bits=2), _STORED, _TWO_ZERO, _q2_k),
    "Q3_K": BlockType(BlockForm("Q3_K", 4, 16, "", "float32", stored_bits=3), _STORED, 8, _q3_k),
    "Q4_K": BlockType(BlockForm("Q4_K", 4, 32, "minimums", "float32"), _STORED, 0, _q4_k),
    "Q5_K": BlockType(BlockForm("Q5_K", 8, 32, "minimums", "float32", stored_bits=5), _STORED, FIVE_ZERO, _q5_k),
    "Q6_K": BlockType(BlockForm("Q6_K", 8, 16, "", "float32", stored_bits=6), _STORED, 128, _q6_k),
    "IQ4_XS": BlockType(BlockForm("IQ4_XS", 8, 32, "", "float32", stored_bits=4, table="iq4"), _STORED, 128, _iq4_xs),
}
