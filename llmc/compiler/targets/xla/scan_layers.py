"""A step whose layers are one body that is run once a layer, instead of a copy of it for each (step.py, `Core`).

The compiler sees one layer, however many there are: compile time and code do not grow with depth. Weights of layers are
stacked (scan_names.py); what may be rolled is scan_match.py's to say. Caches are read in the body by the layer's
index and never carried; new entries come out of it stacked, [layers, B, H, Q, D].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from llmc.compiler.program.sized import BoundProgram
from llmc.compiler.targets.xla.evaluate import evaluate
from llmc.compiler.targets.xla.scan_match import RolledProgram, fold
from llmc.compiler.targets.xla.scan_names import NotRollableError, grouped, stacked_names
from llmc.compiler.targets.xla.step import Array, Given, Outcome, Read
from llmc.errors import CompileError

__all__ = ["NotRollableError", "RolledCore", "roll", "stacked_names"]


def roll(program: BoundProgram) -> RolledCore:
    """`program` with one body for all its layers. Raises NotRollableError, saying where layers differ."""
    return RolledCore(program, fold(program))


class RolledCore:
    """A folded program. `weights` are the arguments that `stacked_names` lists, in its order, for every bucket."""

    def __init__(self, program: BoundProgram, folded: RolledProgram) -> None:
        self._program = program
        self._folded = folded
        self.weights = list(grouped(program.weights.values()))

    def run(self, given: Given, read: Read, weights: Sequence[Array]) -> Outcome:
        """See `Core.run`; `read` is given the layer's index as a traced number.

        Raises CompileError, also where layers read values of the prelude that differ in shape.
        """
        program, folded = self._program, self._folded
        arguments = dict(zip(self.weights, weights, strict=True))
        values = dict(given)
        values |= {name: arguments[n] for name, n in program.weights.items() if n in arguments}
        evaluate(program, folded.prelude, values)
        choices = {name: tuple(dict.fromkeys(names)) for name, names in folded.varying.items()}
        stacks = {name: _stack([values[n] for n in names], names) for name, names in choices.items()}

        def layer(carried: tuple[Array, ...], each: tuple[Any, ...]) -> tuple[tuple[Array, ...], tuple[Array, Array]]:
            index, own, chosen = each
            inside = values | own | {c.inside: v for c, v in zip(folded.carries, carried, strict=True)}
            for name, stack in stacks.items():
                inside[name] = lax.dynamic_index_in_dim(stack, chosen[name], keepdims=False)
            if folded.cache:
                inside |= {name: read(group, index) for group, name in enumerate(folded.cache)}
            evaluate(program, folded.body, inside)
            key, value = folded.new_entries
            return tuple(inside[c.after] for c in folded.carries), (inside[key], inside[value])

        layers = (
            jnp.arange(folded.layers, dtype=jnp.int32),
            {name: arguments[stack] for name, stack in folded.weights.items()},
            {n: jnp.array([choices[n].index(c) for c in names], jnp.int32) for n, names in folded.varying.items()},
        )
        carried, (keys, news) = lax.scan(layer, tuple(values[c.before] for c in folded.carries), layers)
        values |= {c.last: v for c, v in zip(folded.carries, carried, strict=True) if c.last is not None}
        evaluate(program, folded.epilogue, values)
        logits, *top = (values[name] for name in program.outputs[: 3 if program.top else 1])
        return Outcome(logits, tuple(top), (keys, news))


def _stack(arrays: Sequence[Array], names: Sequence[str]) -> Array:
    if len({a.shape for a in arrays}) > 1:
        shapes = ", ".join(f"{n} {list(a.shape)}" for n, a in zip(names, arrays, strict=True))
        raise CompileError(
            f"the layers cannot be rolled into one body: they read {shapes} in the same place; compile with "
            "--no-roll-layers"
        )
    return jnp.stack(arrays)
