"""A program over weights in 8 bits: what it reads as one matrix are two inputs (formats.py)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from llmc.compiler.targets.xla.formats import SCALE
from llmc.compiler.targets.xla.quantised import Quantised
from llmc.compiler.targets.xla.step import Array, Core, Given, Outcome, Read


class Parts:
    """The weights that a program reads by these names, of which some are two inputs: codes, and scales behind them."""

    def __init__(self, read: Sequence[str], weights: Collection[str]) -> None:
        """`weights`: the names of all inputs that are weights, scales included."""
        self._scaled = [name + SCALE in weights for name in read]
        self.names = [
            part
            for name, scaled in zip(read, self._scaled, strict=True)
            for part in ((name, name + SCALE) if scaled else (name,))
        ]

    def joined(self, given: Sequence[Array]) -> list[Any]:
        """What the program reads, of the inputs `names`."""
        rest = iter(given)
        return [Quantised(next(rest), next(rest)) if scaled else next(rest) for scaled in self._scaled]


class QuantisedCore:
    """A core, some of whose weights are in two `Parts`."""

    def __init__(self, core: Core, weights: Collection[str]) -> None:
        """`weights`: the names of all inputs that are weights, scales included."""
        self._core = core
        self._parts = Parts(core.weights, weights)
        self.weights = self._parts.names

    def run(self, given: Given, read: Read, weights: Sequence[Array]) -> Outcome:
        """See `Core.run`."""
        return self._core.run(given, read, self._parts.joined(weights))
