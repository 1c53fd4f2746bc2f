"""How matrices are held in an OpenVINO model: the constants they are declared as, and their decompression.

A decompression is a few operators that OpenVINO's plugins fuse into the matrix product: convert, subtract the zero
point, multiply by the scale, back to [N, K]. Linear weights are [N, K], N outputs by K inputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import openvino as ov
from openvino import opset13 as ops

from llmc.compiler.lowering.recipes import Recipe
from llmc.compiler.openvino.constants import Constants

Shape = tuple[int, ...]


class WeightFormat:
    """float32, and the base of the others."""

    def __init__(self, constants: Constants) -> None:
        self.constants = constants

    def vector(self, source: str, shape: Shape) -> Any:
        """A tensor that stays as it is: norms and biases."""
        return self.constants.declare(Recipe(source, "dense", (source,)), ov.Type.f32, shape)

    def concatenated(self, sources: Sequence[str], shapes: Sequence[Shape]) -> Any:
        """Vectors one after the other."""
        if len(sources) == 1:
            return self.vector(sources[0], shapes[0])
        recipe = Recipe("+".join(sources), "dense", tuple(sources))
        return self.constants.declare(recipe, ov.Type.f32, (sum(s[0] for s in shapes),))

    def matrix(self, sources: Sequence[str], shapes: Sequence[Shape], looked_up: bool = False) -> Any:
        """The rows of several matrices [N, K] one after the other, in float32.

        `looked_up`: rows are gathered from it (an embedding), which a tied head shares.
        """
        rows, width = stacked(shapes)
        recipe = Recipe("+".join(sources), "dense", tuple(sources))
        return self.constants.declare(recipe, ov.Type.f32, (rows, width))


class Int8(WeightFormat):
    """Symmetric 8-bit integers, w ≈ scale · q, a float32 scale for every row (`group` 0) or every `group` inputs."""

    def __init__(self, constants: Constants, group: int = 0) -> None:
        super().__init__(constants)
        self.group = group

    def matrix(self, sources: Sequence[str], shapes: Sequence[Shape], looked_up: bool = False) -> Any:
        """As float32 [N, K]; where the group does not divide K, the largest common divisor does."""
        rows, width = stacked(shapes)
        group = math.gcd(self.group, width) if self.group else 0
        data_shape = (rows, width // group, group) if group else (rows, width)
        stem, names = "+".join(sources), tuple(sources)
        data = self.constants.declare(Recipe(f"{stem}.i8", "i8_data", names, group), ov.Type.i8, data_shape)
        scales_shape = (*data_shape[:-1], 1)
        scales = self.constants.declare(Recipe(f"{stem}.scale", "i8_scales", names, group), ov.Type.f32, scales_shape)
        made = ops.multiply(ops.convert(data, ov.Type.f32), scales)
        if group:
            made = ops.reshape(made, self.constants.small([rows, width]), False)
        return made


def stacked(shapes: Sequence[Shape]) -> tuple[int, int]:
    """(N, K) of matrices one after the other."""
    return sum(s[0] for s in shapes), shapes[0][1]
