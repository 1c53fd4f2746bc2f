"""Constants of an OpenVINO model that is built without its weights.

Every constant, from a matrix to the axis of a gather, is declared under a name with a recipe for its bytes
(weights/recipes.py). Only constants that OpenVINO reads (tables) hold their values already. `set_placements` then
writes the offsets of the weights file into the model's XML, in the form of OpenVINO's IR:

    <layer name="NAME" type="Const"><data element_type="…" shape="…" offset="BYTES" size="BYTES"/>…

One content-addressed weights file can therefore serve any number of models.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

from llmc.compiler.weights.recipes import Placement, Recipe
from llmc.errors import CompileError

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
    """Write every constant's offset in the weights file into the model's XML.

    Raises CompileError where a constant has no offset, or another size.
    """

    def placed(match: re.Match[str]) -> str:
        head, name, size = match.groups()
        at = placements.get(name)
        if at is None or at.length not in (0, int(size)):  # OpenVINO gives an empty constant one byte
            raise CompileError(f"constant {name!r} of {size} bytes has no such place in the weights file: {at}")
        return f'{head} offset="{at.offset}" size="{size}"'

    result, count = _CONST.subn(placed, xml)
    written = xml.count('type="Const"')
    if count != written:
        raise CompileError(f"OpenVINO wrote {written} constants, {count} of them as expected")
    return result
