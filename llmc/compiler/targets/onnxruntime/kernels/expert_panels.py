"""Tensors of experts [E, N, K] in panels: the matrices of all experts one after the other (source/experts.c).

Families eachpq8, eachpkept4 and so on are pq8, pkept4 and so on (panels.py) of each expert, with the same parts;
turnedpq8 and turnedpq4 those of tensors [E, K, N], whose blocks, where they have any, are of matrices [N, K] already.

"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.targets.onnxruntime.kernels import panels
from llmc.compiler.targets.onnxruntime.kernels.panels import PARTS, Panels
from llmc.compiler.weights.experts import each_expert
from llmc.compiler.weights.recipes import TensorSource

_Make = Callable[[Sequence[str], TensorSource, int], Panels]


class ExpertPanels(Mapping[str, NDArray[np.uint8]]):
    """The parts of one tensor of experts, each made when it is asked for, an expert at a time."""

    def __init__(
        self, make: _Make, names: Sequence[str], source: TensorSource, block: int, *, turned: bool = False
    ) -> None:
        (self.name,) = names
        self.make, self.source, self.block, self.turned = make, source, block, turned

    def __getitem__(self, part: str) -> NDArray[np.uint8]:
        if part not in PARTS:
            raise KeyError(part)
        each = each_expert(self.name, self.source, turned=self.turned)
        return np.concatenate([self.make([one.name], one, self.block)[part] for one in each])

    def __iter__(self) -> Iterator[str]:
        return iter(PARTS)

    def __len__(self) -> int:
        return len(PARTS)


eachpq8 = partial(ExpertPanels, panels.pq8)
eachpq4 = partial(ExpertPanels, panels.pq4)
turnedpq8 = partial(ExpertPanels, panels.pq8, turned=True)
turnedpq4 = partial(ExpertPanels, panels.pq4, turned=True)
eachpkept4 = partial(ExpertPanels, panels.pkept4)
eachpkept6 = partial(ExpertPanels, panels.pkept6)
eachpkept8 = partial(ExpertPanels, panels.pkept8)
eachpkeptiq4 = partial(ExpertPanels, panels.pkeptiq4)
eachpkeptfloat4 = partial(ExpertPanels, panels.pkeptfloat4)
