"""A step over weights in 8 bits: what its program reads as one matrix are two inputs (formats.py)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from llmc.compiler.targets.xla.formats import SCALE
from llmc.compiler.targets.xla.quantised import Quantised
from llmc.compiler.targets.xla.step import Array, Core, Outcome, Read


class QuantisedCore:
    """A core, some of whose weights are two inputs: codes, and scales behind them."""

    def __init__(self, core: Core, weights: Collection[str]) -> None:
        """`weights`: the names of all inputs that are weights, scales included."""
        self._core = core
        self._scaled = [name + SCALE in weights for name in core.weights]
        self.weights = [
            part
            for name, scaled in zip(core.weights, self._scaled, strict=True)
            for part in ((name, name + SCALE) if scaled else (name,))
        ]

    def run(
        self, token_ids: Array, past_lengths: Array, new_lengths: Array, read: Read, weights: Sequence[Array]
    ) -> Outcome:
        """See `Core.run`."""
        given = iter(weights)
        joined = [Quantised(next(given), next(given)) if scaled else next(given) for scaled in self._scaled]
        return self._core.run(token_ids, past_lengths, new_lengths, read, joined)
