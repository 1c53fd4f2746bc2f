"""Matrix formats in an OpenVINO model: their constants and their decompression.

A decompression is a few operators that OpenVINO's plugins fuse into the matmul: convert, subtract the zero point,
multiply by the scale, reshape to [N, K]. Linear weights are [N, K], N outputs by K inputs. Scales and zero points are
float32, to which the CPU plugin converts float16 ones when it compiles; compiled models have narrower scales where
these are exact (finish.py).

A model is built without its weights. Every constant, from a matrix to the axis of a gather, is declared under a name
with a recipe for its bytes (weights/recipes.py). Only constants that OpenVINO reads (tables) hold their values already.
`set_placements` then writes the offsets of the weights file into the model's XML, in the form of OpenVINO's IR:

    <layer name="NAME" type="Const"><data element_type="…" shape="…" offset="BYTES" size="BYTES"/>…

One content-addressed weights file can therefore serve any number of models.

The plugin multiplies matrices without zero points in 8-bit integers, with activations quantized in groups at run time,
and those with zero points in float32 or bfloat16: exact for activations, and slower (benchmarks/openvino_formats.py).
"""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

from llmc.compiler.architectures.shared.block_form import BlockForm, common_block, common_order
from llmc.compiler.architectures.shared.experts import stay_floats
from llmc.compiler.architectures.shared.names import EMBED_LM_HEAD
from llmc.compiler.checkpoint.adapter_layout import of_adapters
from llmc.compiler.targets.openvino.precision import DTYPES, GROUPS, group_of
from llmc.compiler.weights.recipes import Placement, Recipe
from llmc.errors import CompileError, InputError

_CONST = re.compile(
    r'(<layer id="\d+" name="([^"]*)" type="Const"[^>]*>\s*<data element_type="\w+" shape="[^"]*") '
    r'offset="\d+" size="(\d+)"'
)


class Constants:
    """Declares constants, and keeps their recipes in the order of their first use."""

    def __init__(self) -> None:
        self.recipes: list[Recipe] = []
        self.tables: dict[str, NDArray[Any]] = {}
        self._nodes: dict[str, ov.Node] = {}

    def declare(self, recipe: Recipe, dtype: ov.Type, shape: tuple[int, ...]) -> ov.Node:
        """Return the constant of `recipe`; repeated calls return the same node."""
        return self._nodes.get(recipe.name) or self._add(recipe, ops.constant(ov.Tensor(dtype, ov.Shape(shape))))

    def table(self, name: str, values: NDArray[Any]) -> ov.Node:
        """Return a constant with known values."""
        if name not in self._nodes:
            self.tables[name] = values
            self._add(Recipe(name, "table", ()), ops.constant(values))
        return self._nodes[name]

    def _add(self, recipe: Recipe, node: ov.Node) -> ov.Node:
        node.set_friendly_name(recipe.name)
        self._nodes[recipe.name] = node
        self.recipes.append(recipe)
        return node

    def small(self, values: Any, dtype: type = np.int32) -> ov.Node:
        """Return a table named by its values, for axes, shapes and scalars."""
        array: NDArray[Any] = np.asarray(values, dtype)
        digits = "_".join(map(str, array.ravel().tolist()))
        return self.table(f"const_{array.dtype}_{'x'.join(map(str, array.shape))}_{digits}", array)


def to_xml(model: ov.Model, folder: Path) -> str:
    """Serialise the model to XML; the placeholder constants file is written in `folder` and removed."""
    file, constants = folder / "model.xml", folder / "model.bin"
    ov.serialize(model, file, constants)
    constants.unlink()
    xml = file.read_text()
    file.unlink()
    return xml


def set_placements(xml: str, placements: Mapping[str, Placement]) -> str:
    """Write all offsets in the weights file into a model's XML. Raises CompileError for an absent or other constant."""

    def placed(match: re.Match[str]) -> str:
        head, name, size = match.groups()
        at = placements.get(name)
        if at is None or at.length not in (0, int(size)):  # OpenVINO gives an empty constant one byte
            raise CompileError(f"constant {name!r} of {size} bytes has no such place in the weights file: {at}")
        return f'{head} offset="{at.offset}" size="{size}"'

    return replace_constants(_CONST, placed, xml)


def replace_constants(form: re.Pattern[str], replacement: Callable[[re.Match[str]], str], xml: str) -> str:
    """Replace all constants of a model's XML. Raises CompileError where one has another form."""
    result, count = form.subn(replacement, xml)
    written = xml.count('type="Const"')
    if count != written:
        raise CompileError(f"OpenVINO wrote {written} constants, {count} of them as expected")
    return result


Shape = tuple[int, ...]
_LEAST_GROUP = 16

_KEPT_CONVERSION = (
    '<net name="kept" version="11"><layers>'
    '<layer id="0" name="c" type="Const" version="opset1"><data element_type="{0}" shape="1" offset="0" size="2"/>'
    '<output><port id="0" precision="{1}"><dim>1</dim></port></output></layer>'
    '<layer id="1" name="f" type="Convert" version="opset1"><data destination_type="f32"/>'
    '<rt_info><attribute name="decompression" version="0"/></rt_info>'
    '<input><port id="0" precision="{1}"><dim>1</dim></port></input>'
    '<output><port id="1" precision="FP32"><dim>1</dim></port></output></layer>'
    '<layer id="2" name="r" type="Result" version="opset1">'
    '<input><port id="0" precision="FP32"><dim>1</dim></port></input></layer>'
    '</layers><edges><edge from-layer="0" from-port="0" to-layer="1" to-port="0"/>'
    '<edge from-layer="1" from-port="1" to-layer="2" to-port="0"/></edges></net>'
)


class WeightFormat:
    """The float32 format, and the base of the others."""

    def __init__(self, constants: Constants) -> None:
        self.constants = constants

    def vector(self, source: str, shape: Shape) -> Any:
        """Return a tensor that is not quantized, such as norms and biases."""
        return self.constants.declare(Recipe(source, "dense", (source,)), ov.Type.f32, shape)

    def concatenated(self, sources: Sequence[str], shapes: Sequence[Shape]) -> Any:
        if len(sources) == 1:
            return self.vector(sources[0], shapes[0])
        recipe = Recipe("+".join(sources), "dense", tuple(sources))
        return self.constants.declare(recipe, ov.Type.f32, (sum(s[0] for s in shapes),))

    def inputs(self, x: Any, sources: Sequence[str], width: int) -> Any:
        """Reorder the last axis of `x` [..., width] for the matrix of `sources`."""
        return x

    def holds_beside(self, width: int, more: int) -> bool:
        """Whether a matrix of `width` inputs keeps its format with one of `more` inputs appended."""
        return True

    def matrix(self, sources: Sequence[str], shapes: Sequence[Shape], *, reordered: bool = False) -> Any:
        """Return stacked matrices [N, K] as float32; `reordered`: its input is in the order of `inputs`."""
        rows, width = stacked(shapes)
        recipe = Recipe("+".join(sources), "dense", tuple(sources))
        return self.constants.declare(recipe, ov.Type.f32, (rows, width))

    def turned(self, source: str, shape: Shape) -> Any | None:
        """Return experts [E, K, N] as float32 [E · N, K], if they are stored so; else None."""
        return None


class Half(WeightFormat):
    """bfloat16 or float16 matrices, which OpenVINO keeps and multiplies in that type."""

    def __init__(self, constants: Constants, dtype: str) -> None:
        super().__init__(constants)
        self._transform, self._type = ("bf16", ov.Type.bf16) if dtype == "bf16" else ("f16_data", ov.Type.f16)

    def matrix(self, sources: Sequence[str], shapes: Sequence[Shape], *, reordered: bool = False) -> Any:
        recipe = Recipe(f"{'+'.join(sources)}.{self._type.get_type_name()}", self._transform, tuple(sources))
        return kept_conversion(self.constants.declare(recipe, self._type, stacked(shapes)))


@dataclass(frozen=True)
class Held:
    """The storage of a matrix: recipe family (compression.py), and inputs that share a scale, 0 for the whole row."""

    family: str
    group: int
    order: tuple[int, ...] = ()
    """The order in which its inputs are read, () for their own."""

    @property
    def type(self) -> ov.Type:
        return {"i8": ov.Type.i8, "u8": ov.Type.u8, "u4": ov.Type.u4, "f4": ov.Type.f4e2m1}[self.family[:2]]

    @property
    def zeros(self) -> bool:
        return self.family[0] == "u"


class Compressed(WeightFormat):
    """Base of quantized formats: w ≈ scale · (code − zero point).

    `stored`: the names of tensors that the checkpoint holds in blocks, each with its form; 4-bit blocks are kept.
    """

    stored: Mapping[str, BlockForm] = MappingProxyType({})

    def holds_beside(self, width: int, more: int) -> bool:
        return False

    @abstractmethod
    def held(self, sources: Sequence[str], width: int) -> Held:
        """Return the storage of the stacked matrix of `sources` with `width` inputs."""

    def inputs(self, x: Any, sources: Sequence[str], width: int) -> Any:
        held = self.held(sources, width)
        if not held.order:
            return x
        order = self.constants.table(f"order_of_{'+'.join(sources)}", np.array(held.order, np.int32))
        return ops.gather(x, order, self.constants.small(-1))

    def matrix(self, sources: Sequence[str], shapes: Sequence[Shape], *, reordered: bool = False) -> Any:
        if stay_floats(sources, self.stored):
            return super().matrix(sources, shapes, reordered=reordered)
        rows, width = stacked(shapes)
        held = self.held(sources, width)
        if held.order and not reordered:
            held = Held("i8", _fitting(GROUPS["keep"][0], width))
        return self.decompressed(held, sources, rows, width, reordered=bool(held.order))

    def decompressed(self, held: Held, sources: Sequence[str], rows: int, width: int, *, reordered: bool) -> Any:
        """Return float32 [rows, width]; `reordered`: from the sources' reordered blocks."""
        groups: Shape = (width // held.group,) if held.group else ()
        stem, names = f"{'+'.join(sources)}.{held.family}{f'_{held.group}' if held.group else ''}", tuple(sources)

        def part(name: str, what: str, dtype: ov.Type, last: int) -> Any:
            recipe = Recipe(f"{stem}{name}", f"{held.family}_{what}", names, held.group, reordered)
            return self.constants.declare(recipe, dtype, (rows, *groups, last))

        built = ops.convert(part("", "data", held.type, held.group or width), ov.Type.f32)
        if held.zeros:
            built = ops.subtract(built, part(".zero", "zeros", ov.Type.f32, 1))
        built = ops.multiply(built, part(".scale", "scales", ov.Type.f32, 1))
        return ops.reshape(built, self.constants.small([rows, width]), False) if held.group else built


class Int8(Compressed):
    """Symmetric 8-bit integers, a scale for every row (`group` 0) or every `group` inputs."""

    def __init__(self, constants: Constants, group: int = 0) -> None:
        super().__init__(constants)
        self.group = group

    def holds_beside(self, width: int, more: int) -> bool:
        return bool(self.group) and not width % self.group and not more % self.group

    def held(self, sources: Sequence[str], width: int) -> Held:
        """Where the group does not divide the inputs, it is the largest common divisor, or the row if that is small."""
        return Held("i8", _fitting(self.group, width))


class Int4(Compressed):
    """4-bit weights with zero points, and 8-bit ones for adapters, `wide` tensors, embedding and lm_head.

    Embedding and lm_head have 4 bits if `lm_head_bits` is 4 or `stored` has them in 4 bits.
    """

    def __init__(
        self, constants: Constants, group: int, stored: Mapping[str, BlockForm], wide: Collection[str],
        lm_head_bits: int,
    ) -> None:  # fmt: skip
        super().__init__(constants)
        self.group = group
        self.stored = stored
        self.eight = frozenset(wide) if lm_head_bits == 4 else EMBED_LM_HEAD.union(wide)

    def held(self, sources: Sequence[str], width: int) -> Held:
        """By name where the group fits the width, else 8 bits."""
        group, forms = _fitting(self.group, width), [self.stored.get(s) for s in sources]
        order, four = common_order(forms), all(form is not None and form.bits == 4 for form in forms)
        if group and order and four:
            return Held("u4kept", common_block([form for form in forms if form is not None], group), order)
        if group and four and order is not None:
            return Held("u4", group)
        eight = any(s in self.eight for s in sources) or of_adapters(sources)
        return Held("i8", group) if eight or not group else Held("u4", group)


class Kept(Compressed):
    """The blocks that the checkpoint stores, exactly; other matrices in 8 bits, in groups of at most 32.

    Stacked matrices that are stored in different ways all become 8-bit weights with zero points; stored blocks keep
    their values. Blocks of different sizes are split, which changes no value. `halves`: names of tensors stored in
    8-bit floats, which become float16.
    """

    def __init__(
        self, constants: Constants, stored: Mapping[str, BlockForm], halves: Collection[str] = frozenset()
    ) -> None:
        super().__init__(constants)
        self.stored, self.halves = stored, halves

    def matrix(self, sources: Sequence[str], shapes: Sequence[Shape], *, reordered: bool = False) -> Any:
        if all(source in self.halves for source in sources):
            return Half(self.constants, "f16").matrix(sources, shapes)
        return super().matrix(sources, shapes, reordered=reordered)

    def turned(self, source: str, shape: Shape) -> Any | None:
        form, (experts, width, rows) = self.stored.get(source), shape
        if form is None or not form.turned:
            return None
        return self.decompressed(Held("f4kept", form.block), [source], experts * rows, width, reordered=True)

    def held(self, sources: Sequence[str], width: int) -> Held:
        forms = [self.stored.get(s) for s in sources]
        held = [form for form in forms if form is not None]
        default = GROUPS["keep"][0]
        order = common_order(forms)
        if not held or order is None:
            return Held("i8", _fitting(default, width))
        block = math.gcd(*(form.block for form in held))
        if len(held) < len(forms):
            return Held("u8kept", math.gcd(block, default))
        if all(form.table == "float4" for form in held) and EMBED_LM_HEAD.isdisjoint(sources):
            return Held("f4kept", block, order)
        if all(form.bits == 8 and not form.offsets for form in held):
            return Held("i8kept", 0 if block == width else block, order)
        return Held("u4kept" if all(form.bits == 4 for form in held) else "u8kept", block, order)


Factory = Callable[[Constants], WeightFormat]


def format_for(
    quantize: str, dtype: str = "f32", group: int | None = None, stored: Mapping[str, BlockForm] | None = None,
    halves: Collection[str] = frozenset(), wide: Collection[str] = (), lm_head_bits: int = 8,
) -> Factory:  # fmt: skip
    """Return the factory of the requested format; `group` None is the default of GROUPS.

        stored    names of tensors that the checkpoint holds in blocks → form (Checkpoint.stored_form), a tied lm_head
                  under its own name as well
        halves    names of those in 8-bit floats
        wide      names of those that int4 holds in 8 bits; embedding and lm_head have `lm_head_bits`

    Raises InputError, listing the offered combinations, for another one.
    """
    if quantize not in GROUPS or dtype not in DTYPES[quantize]:
        offered = "; ".join(f"{q} with {', '.join(d)}" for q, d in DTYPES.items())
        raise InputError(f"openvino does not offer --quantize {quantize} with --dtype {dtype}; it offers {offered}")
    group = group_of(quantize, group)
    if quantize == "int8":
        return lambda constants: Int8(constants, group)
    if quantize == "int4":
        return lambda constants: Int4(constants, group, stored or {}, wide, lm_head_bits)
    if quantize == "keep":
        return lambda constants: Kept(constants, stored or {}, halves)
    return WeightFormat if dtype == "f32" else lambda constants: Half(constants, dtype)


def kept_conversion(constant: ov.Node) -> ov.Node:
    """Return `constant`, bfloat16 or float16, as float32, by a conversion that OpenVINO does inside the matmul.

    OpenVINO folds other conversions when it compiles, and then holds float32. Those it keeps bear a mark,
    `decompression`, which Python cannot set; a model that is read from XML can have it.
    """
    kind = constant.get_element_type().get_type_name()
    xml = _KEPT_CONVERSION.format(kind, {"bf16": "BF16", "f16": "FP16"}[kind])
    model = ov.Core().read_model(xml.encode(), ov.Tensor(np.zeros(2, np.uint8)))
    conversion = next(n for n in model.get_ops() if n.get_type_name() == "Convert")
    conversion.input(0).replace_source_output(constant.output(0))
    conversion.validate_and_infer_types()
    return conversion


def _fitting(group: int, width: int) -> int:
    """The group, or its largest divisor of `width`; 0 where that is too small."""
    found = math.gcd(group, width) if group else 0
    return found if found >= _LEAST_GROUP else 0


def stacked(shapes: Sequence[Shape]) -> tuple[int, int]:
    """Return (N, K) of stacked matrices."""
    return sum(s[0] for s in shapes), shapes[0][1]
