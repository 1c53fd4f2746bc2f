"""Tensors of experts [E, N, K] in panels: the matrices of all experts one after the other (source/experts.c).

Families eachpq8, eachpq4, eachpkept4 and eachpkept8 are pq8, pq4, pkept4 and pkept8 (panels.py) of each expert, with
the same parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.targets.onnxruntime.kernels.panels import PARTS, Panels, pkept4, pkept8, pq4, pq8
from llmc.compiler.weights.experts import each_expert
from llmc.compiler.weights.recipes import TensorSource

_Make = Callable[[Sequence[str], TensorSource, int], Panels]


class ExpertPanels(Mapping[str, NDArray[np.uint8]]):
    """The parts of one tensor of experts, each made when it is asked for, an expert at a time."""

    def __init__(self, make: _Make, names: Sequence[str], source: TensorSource, block: int) -> None:
        (self.name,) = names
        self.make, self.source, self.block = make, source, block

    def __getitem__(self, part: str) -> NDArray[np.uint8]:
        if part not in PARTS:
            raise KeyError(part)
        each = each_expert(self.name, self.source)
        return np.concatenate([self.make([one.name], one, self.block)[part] for one in each])

    def __iter__(self) -> Iterator[str]:
        return iter(PARTS)

    def __len__(self) -> int:
        return len(PARTS)


eachpq8 = partial(ExpertPanels, pq8)
eachpq4 = partial(ExpertPanels, pq4)
eachpkept4 = partial(ExpertPanels, pkept4)
eachpkept8 = partial(ExpertPanels, pkept8)
