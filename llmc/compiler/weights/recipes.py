"""Weight recipes: how each tensor of a lowered graph is built from the checkpoint, and the file that holds them.

A recipe names its source tensors, concatenated along the first axis ([out, in] as the checkpoint stores them), and one
transform:
  dense        float32, unchanged
  bf16         the same in bfloat16 (uint16 here), rounded to nearest, ties to even
  transposed   float32 [in, out]
  q8_data      uint8 [out, in/block, block]: blockwise symmetric 8-bit, zero point 128
  q8_rows      the same bytes as [out, in], for row look-ups
  q8_scales    float32 [out, in/block]
  table        a computed constant, stored with the recipes
  int8_codes   int8 [out, in]: symmetric, a scale for each row; rounded to nearest, ties to even
  int8_scales  float32 [out]: largest magnitude of the row / 127, 1 for a row of zeros
  fp8_codes, fp8_scales   the same in float8 e4m3 (no infinities), whose largest number is 448 (OCP 8-bit Floating
               Point Specification, revision 1.0)
  experts_in_turn   float32 [E, N, K] with the rows of an expert's first and second half interleaved, as ONNX Runtime's
               MoE operator takes gate and up
Other transforms are FAMILY_PART, of a family in FAMILIES; all parts of a matrix are built together.

Quantisation rule (ONNX Runtime MatMulNBits): scale = v / −128 with v the value of largest magnitude in the block, so
that v itself is exact; q = round(w / scale) + 128, clipped to 0 … 255; w ≈ scale · (q − 128).

Weights file: tensors back to back, each starting at a multiple of 4096 bytes (a page, so that it can be mapped).
Tensors with equal content are stored once. Concatenated tensors, such as one source per layer, are written source by
source, which needs memory for the largest source only; they are not compared with other tensors.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from importlib import import_module
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.checkpoint.base import stored_name
from llmc.errors import CheckpointError

if TYPE_CHECKING:
    from torch import nn

    from llmc.compiler.checkpoint.base import QuantisedBlocks


Floats = NDArray[np.float32]
LARGEST = {"int8": 127, "fp8": 448}
"""The largest quantized value of each format."""


def scales(weight: Floats, name: str) -> Floats:
    """The scale of each row: [.., K] → [..]."""
    found: Floats = np.abs(weight).max(-1) / np.float32(LARGEST[name])
    found[found < np.finfo(np.float32).tiny] = 1
    return found


def quantized(weight: Floats, scale: Floats, name: str) -> NDArray[np.int8]:
    """Quantize rows with these scales: [.., K] → [.., K]; fp8 as its bits."""
    largest = LARGEST[name]
    held = np.clip(weight / scale[..., None], -largest, largest)
    if name == "int8":
        found: NDArray[np.int8] = np.rint(held).astype(np.int8)
        return found
    from ml_dtypes import float8_e4m3fn

    bits: NDArray[np.int8] = held.astype(float8_e4m3fn).view(np.int8)
    return bits


def _quantizer(name: str) -> Callable[[Floats], NDArray[np.int8]]:
    return lambda weight: quantized(weight, scales(weight, name), name)


SCALES: Mapping[str, Callable[[Floats], Floats]] = {f"{name}_scales": partial(scales, name=name) for name in LARGEST}
"""Transforms of a tensor [N, K] to its scales, float32 [N]."""
QUANTIZERS: Mapping[str, Callable[[Floats], NDArray[np.int8]]] = {f"{name}_codes": _quantizer(name) for name in LARGEST}
"""Transforms of a tensor [N, K] to its quantized weights, 8 bits [N, K]."""


ALIGNMENT = 4096
BESIDE = "|"
"""Joins the names of two tensors [N, K] and [N, R] into the name of their concatenation [N, K + R]."""


class Sink(Protocol):
    """Destination of the weights file."""

    def write(self, data: bytes | memoryview, /) -> object:
        """Append `data`."""


class TensorSource(Protocol):
    """The part of a checkpoint (checkpoint/base.py) that recipes read."""

    def tensor_names(self) -> Sequence[str]:
        """Names of all tensors."""

    def tensor(self, name: str) -> NDArray[np.float32]:
        """One tensor in float32."""

    def quantised_blocks(self, name: str) -> QuantisedBlocks | None:
        """The tensor's stored blocks, or None if it is not stored in blocks."""

    def reordered_blocks(self, name: str) -> QuantisedBlocks | None:
        """The tensor's stored blocks with inputs in another order, or None."""


@dataclass(frozen=True)
class _Reordered:
    """A source that returns the reordered blocks of another."""

    source: TensorSource

    def tensor_names(self) -> Sequence[str]:
        return self.source.tensor_names()

    def tensor(self, name: str) -> NDArray[np.float32]:
        raise CheckpointError(f"{name} has no reordered blocks any more: the checkpoint changed; compile again")

    def quantised_blocks(self, name: str) -> QuantisedBlocks | None:
        return self.source.reordered_blocks(name)

    reordered_blocks = quantised_blocks


def stored_names(source: str, names: Container[str]) -> list[str]:
    """Split a source into the checkpoint's tensors, of which it has `names`. Raises CheckpointError for a missing
    one."""
    return [stored_name(part, names) for part in source.split(BESIDE)]


@dataclass(frozen=True)
class _Sources:
    """A checkpoint that also reads sources joined by BESIDE. Raises CheckpointError for missing tensors."""

    checkpoint: TensorSource

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(self.checkpoint.tensor_names())

    def stored(self, name: str) -> str:
        return BESIDE.join(stored_names(name, self._names))

    def tensor_names(self) -> Sequence[str]:
        return self.checkpoint.tensor_names()

    def tensor(self, name: str) -> NDArray[np.float32]:
        parts = [self.checkpoint.tensor(part) for part in name.split(BESIDE)]
        return parts[0] if len(parts) == 1 else np.hstack(parts)

    def quantised_blocks(self, name: str) -> QuantisedBlocks | None:
        return None if BESIDE in name else self.checkpoint.quantised_blocks(name)

    def reordered_blocks(self, name: str) -> QuantisedBlocks | None:
        return None if BESIDE in name else self.checkpoint.reordered_blocks(name)


_NBITS = "llmc.compiler.weights.nbits"
_OPENVINO = "llmc.compiler.targets.openvino.compression"
_PANELS = "llmc.compiler.targets.onnxruntime.kernels.panels"
PANEL_FAMILIES = ("pq8", "pq4", "pkept4", "pkept6", "pkept8", "pkeptiq4", "pkeptfloat4")
FAMILIES = {
    "lora": f"{_PANELS}:lora", "q8": f"{__name__}:q8", "experts": "llmc.compiler.weights.recipes:experts",
    "q4": f"{_NBITS}:q4", "kept4": f"{_NBITS}:kept4", "kept8": f"{_NBITS}:kept8",
    **{family: f"{_PANELS}:{family}" for family in PANEL_FAMILIES},
    **{f"each{family}": f"{_PANELS}:each{family}" for family in PANEL_FAMILIES},
    **{family: f"{_PANELS}:{family}" for family in ("turnedpq8", "turnedpq4")},
    **{family: f"{_OPENVINO}:{family}" for family in ("i8", "u4", "u4kept", "i8kept", "u8kept", "f4kept", "f16")},
}  # fmt: skip
"""Family of transforms → "module:function". The function takes the stored names of the source tensors, the checkpoint,
and the recipe's block, and returns all parts of the matrix by name."""


@dataclass(frozen=True)
class Recipe:
    """One tensor of a lowered graph. `block`: quantization block along the input axis, 0 if unquantized. `reordered`:
    read the sources' reordered blocks (`Checkpoint.reordered_blocks`)."""

    name: str
    transform: str
    sources: tuple[str, ...]
    block: int = 0
    reordered: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"sources": list(self.sources)}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Recipe:
        block, reordered = fields.get("block", 0), bool(fields.get("reordered"))
        return cls(fields["name"], fields["transform"], tuple(fields["sources"]), block, reordered)


@dataclass(frozen=True)
class Placement:
    """Location of a tensor in the weights file, in bytes."""

    offset: int
    length: int


def written(recipes: Sequence[Recipe], tables: Mapping[str, NDArray[Any]]) -> dict[str, bytes]:
    """Files from which a lowering's weights are built: "recipes" as JSON, and "tables" (computed ones) as npz."""
    npz = io.BytesIO()
    np.savez(npz, **tables)  # type: ignore[arg-type]
    described = json.dumps([r.to_json() for r in recipes], sort_keys=True)
    return {"recipes": described.encode(), "tables": npz.getvalue()}


def read_recipes(data: bytes) -> list[Recipe]:
    """Parse the file "recipes" that `written` creates."""
    return [Recipe.from_json(fields) for fields in json.loads(data)]


def read_placements(data: bytes) -> dict[str, Placement]:
    """Parse locations by tensor name, from the JSON that weights/stage.py writes."""
    return {name: Placement(at["offset"], at["length"]) for name, at in json.loads(data).items()}


def quantise_q8(
    weight: NDArray[np.float32],
    block: int,
    held: Callable[[NDArray[np.float32]], NDArray[np.float32]] = np.asarray,
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Quantize [N, K] blockwise to symmetric 8 bits: data uint8 [N, K/block, block], scales float32 [N, K/block].

    K is padded with zeros to a multiple of `block`. If scales are stored in fewer bits, `held` rounds them, and weights
    are quantized with the rounded scales.
    """
    rows, width = weight.shape
    blocks = -(-width // block)
    if blocks * block != width:
        weight = np.pad(weight, ((0, 0), (0, blocks * block - width)))
    w = weight.reshape(rows, blocks, block)
    low, high = w.min(-1), w.max(-1)
    scale = np.where(high > -low, high, low) / np.float32(-128)
    scale = held(scale)
    scale[np.abs(scale) < np.finfo(np.float32).tiny] = 0  # the reciprocal would overflow: the block becomes zero
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)
    q = w * inverse[..., None]
    np.rint(q, out=q)
    q += 128
    np.clip(q, 0, 255, out=q)
    return q.astype(np.uint8), scale


def q8(names: Sequence[str], source: TensorSource, block: int) -> dict[str, NDArray[Any]]:
    """Build the parts of family q8."""
    data, scales = quantise_q8(np.concatenate([source.tensor(n) for n in names]), block)
    return {"data": data, "rows": data, "scales": scales}


def to_bf16(array: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round finite `array` to bfloat16, ties to even; returns the bits: float32 [..] → uint16 [..]."""
    bits = np.ascontiguousarray(array).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def write_weights(
    recipes: Sequence[Recipe], source: TensorSource, tables: Mapping[str, NDArray[np.float32]], out: Sink,
    done: Callable[[], None] = lambda: None,
) -> dict[str, Placement]:  # fmt: skip
    """Build every tensor, write the weights file, and return the location of each tensor. Calls `done` after each
    tensor. Raises CheckpointError."""
    placed: dict[str, Placement] = {}
    by_content: dict[bytes, Placement] = {}
    end = 0
    for recipe, parts in _tensors(recipes, source, tables):
        first = next(parts)
        content = recipe.name.encode() if _is_concatenated(recipe) else hashlib.sha256(first).digest()
        if content not in by_content:
            start = -(-end // ALIGNMENT) * ALIGNMENT
            out.write(b"\0" * (start - end))
            end = start
            for part in chain([first], parts):
                out.write(part)
                end += part.nbytes
            by_content[content] = Placement(start, end - start)
        placed[recipe.name] = by_content[content]
        done()
    return placed


Family = Callable[[Sequence[str], TensorSource, int], Mapping[str, NDArray[Any]]]


def _function(where: str) -> Family:
    module, name = where.split(":")
    found: Family = getattr(import_module(module), name)
    return found


_ROW_WISE: Mapping[str, Callable[[NDArray[np.float32]], NDArray[Any]]] = {
    "dense": np.asarray, "bf16": to_bf16, **QUANTIZERS, **SCALES,
}  # fmt: skip
"""Transforms that can be applied to each source separately."""


def _is_concatenated(recipe: Recipe) -> bool:
    return len(recipe.sources) > 1 and recipe.transform in _ROW_WISE


def _tensors(
    recipes: Sequence[Recipe], checkpoint: TensorSource, tables: Mapping[str, NDArray[np.float32]]
) -> Iterator[tuple[Recipe, Iterator[memoryview]]]:
    source = _Sources(checkpoint)
    last: tuple[tuple[str, tuple[str, ...], int, bool], Mapping[str, NDArray[Any]]] | None = None
    for recipe in recipes:
        names = [source.stored(n) for n in recipe.sources]
        if _is_concatenated(recipe):
            convert = _ROW_WISE[recipe.transform]
            yield recipe, (_bytes(convert(source.tensor(name))) for name in names)
            continue
        if recipe.transform == "table":
            array: NDArray[Any] = tables[recipe.name]
        elif (split := recipe.transform.split("_", 1))[0] in FAMILIES:
            family, part = split
            key = (family, recipe.sources, recipe.block, recipe.reordered)
            if last is None or last[0] != key:
                read = _Reordered(source) if recipe.reordered else source
                last = (key, _function(FAMILIES[family])(names, read, recipe.block))
            array = last[1][part]
        else:
            array = np.concatenate([source.tensor(name) for name in names])
            array = array.T if recipe.transform == "transposed" else _ROW_WISE[recipe.transform](array)
        yield recipe, iter([_bytes(array)])


def _bytes(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data if array.size else memoryview(b"")


class ModuleTensors:
    """Parameters of a loaded module by their names in the traced program, which lack the "model." of
    frontend/encode.py."""

    def __init__(self, module: nn.Module) -> None:
        self._tensors = {name.removeprefix("model."): tensor for name, tensor in module.state_dict().items()}

    def tensor_names(self) -> Sequence[str]:
        return list(self._tensors)

    def tensor(self, name: str) -> NDArray[Any]:
        found: NDArray[Any] = self._tensors[name].float().numpy()
        return found

    def quantised_blocks(self, name: str) -> QuantisedBlocks | None:
        return None

    reordered_blocks = quantised_blocks


@dataclass(frozen=True)
class OneExpert:
    """A source (recipes.py, TensorSource) with one tensor `name`: one expert's matrix [N, K], dense or in blocks."""

    name: str
    matrix: NDArray[np.float32] | None
    blocks: QuantisedBlocks | None = None

    def tensor_names(self) -> Sequence[str]:
        return [self.name]

    def tensor(self, name: str) -> NDArray[np.float32]:
        if self.matrix is not None:
            return self.matrix
        assert self.blocks is not None
        return self.blocks.dequantise()

    def quantised_blocks(self, name: str) -> QuantisedBlocks | None:
        return self.blocks

    def reordered_blocks(self, name: str) -> QuantisedBlocks | None:
        return None


def each_expert(name: str, source: TensorSource, *, turned: bool = False) -> Iterator[OneExpert]:
    """Yield the experts of a tensor in order. `turned`: the tensor is [E, K, N] and dense experts are transposed; its
    blocks are of matrices [N, K] already."""
    blocks = source.quantised_blocks(name)
    if blocks is None:
        for i, matrix in enumerate(source.tensor(name)):
            yield OneExpert(f"{name}[{i}]", matrix.T if turned else matrix)
        return
    for i, one in enumerate(blocks.apart()):
        yield OneExpert(f"{name}[{i}]", None, one)


def experts(names: Sequence[str], source: TensorSource, block: int) -> Mapping[str, NDArray[Any]]:
    """Build the parts of family `experts` from one tensor."""
    (name,) = names
    tensor = source.tensor(name)
    count, rows, width = tensor.shape
    return {"in_turn": tensor.reshape(count, 2, rows // 2, width).transpose(0, 2, 1, 3).reshape(tensor.shape)}
