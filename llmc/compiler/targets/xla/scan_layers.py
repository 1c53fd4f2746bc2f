"""Rolls a step's repeated layers into one body that runs once a layer (step.py, `Core`).

The compiler sees one layer, however many there are: compile time and code do not grow with depth. Weights of layers are
stacked (`stacked_names`), and `fold` decides what may be rolled. The body reads caches by the layer's index and never
carries them; new entries come out of it stacked, [layers, B, H, Q, D].

Names. The weights of all layers are one stacked array, named with `*` for the layer. A layer's weight is one whose name
has a component that is a number: "model.layers.3.mlp.up_proj.weight" is layer 3's "model.layers.*.mlp.up_proj.weight";
further numbers, such as experts', stay unchanged.

Folding. The straight line of operators is folded into one body, not traced again. An operation belongs to the highest
layer whose weights or cache it depends on, and to the prelude if there is none. A layer therefore also has the
operations up to the next layer's first weight (the norm's arithmetic); those before layer 0's first weight belong to
the prelude. Rules:

  - Equal operations of the prelude are one: each layer has its own copy of its cache's mask.
  - Operation by operation, layers 0 … L−2 have the same operator, numbers and dtypes, and read the same things: values
    of the layer, the corresponding value of the previous layer (a carry), the layer's weights and cache, or the
    prelude. Where layers read different values of the prelude (masks of sliding and of full attention), the body takes
    its layer's. Layer 0's carries are values of the prelude.
  - The last layer's operations that the body also has are the body's; all others are the epilogue, which reads
    carries, the prelude and weights of no layer.

The body is layer 1's operations, under the program's own names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from llmc.compiler.program.sized import BoundProgram, Operation, Ref
from llmc.compiler.targets.xla.operators import evaluate
from llmc.compiler.targets.xla.step import Array, CoreOutput, Given, Read
from llmc.errors import CompileError

_NUMBERED = re.compile(r"((?:[^.]+\.)*?)([0-9]+)(\..+)")


class NotRollableError(ValueError):
    """The layers of a program cannot share one body; the message says why."""


def starred(name: str) -> tuple[str, int]:
    """Return the name with `*` for the layer, and the layer; the unchanged name and −1 for a weight outside layers."""
    found = _NUMBERED.fullmatch(name)
    return (f"{found[1]}*{found[3]}", int(found[2])) if found else (name, -1)


def grouped(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the arguments of a rolled program, sorted by name, and the weights that each stacks, in layer order.

    Raises NotRollableError where a layer lacks a weight that another has, or where there are two stacks of layers.
    """
    found: dict[str, dict[int, str]] = {}
    for name in names:
        argument, layer = starred(name)
        found.setdefault(argument, {})[layer] = name
    stacks = sorted({argument.partition("*")[0] for argument in found if "*" in argument})
    if len(stacks) > 1:
        raise NotRollableError(f"there are several stacks of layers: {', '.join(s + '*' for s in stacks)}")
    count = 1 + max((layer for layers in found.values() for layer in layers), default=-1)
    for argument, layers in found.items():
        missing = [] if -1 in layers else [layer for layer in range(count) if layer not in layers]
        if missing:
            raise NotRollableError(f"layer {missing[0]} has no {argument}, which layer {min(layers)} has")
    return {argument: tuple(layers[i] for i in sorted(layers)) for argument, layers in sorted(found.items())}


def stacked_names(weights: Mapping[str, Sequence[int]]) -> dict[str, tuple[str, ...]]:
    """Return the arguments of a rolled program over `weights` (shapes by name), in order, with the weights of each.

    "a.*.b" → ("a.0.b", "a.1.b", …), to be stacked along a new first axis; any other weight → itself, unstacked. Raises
    NotRollableError where layers differ in their weights or shapes.
    """
    arguments = grouped(weights)
    for sources in arguments.values():
        for name in sources[1:]:
            if tuple(weights[name]) != tuple(weights[sources[0]]):
                raise NotRollableError(
                    f"{name} is {list(weights[name])}, where {sources[0]} is {list(weights[sources[0]])}"
                )
    return arguments


_Leaf = tuple[Any, ...]
_BODY = 1
"""The layer whose operations are the body."""
_PRELUDE = -1


@dataclass(frozen=True)
class Carry:
    """A value passed between layers, by its names before the first, inside the body, after it, and for the epilogue."""

    before: str
    inside: str
    after: str
    last: str | None
    """None where the last layer has no such value, because nothing reads it."""


@dataclass(frozen=True)
class RolledProgram:
    """A program folded by the rules above; all names are the program's own."""

    layers: int
    prelude: tuple[Operation, ...]
    body: tuple[Operation, ...]
    epilogue: tuple[Operation, ...]
    carries: tuple[Carry, ...]
    weights: Mapping[str, str]
    """The weights that the body reads, to the names of their stacks."""
    varying: Mapping[str, tuple[str, ...]]
    """Values of the prelude under the body's names, to each layer's."""
    cache: tuple[str, ...]
    """Key and value that the body reads, or nothing."""
    new_entries: tuple[str, str]
    """New key and value from the body."""


def fold(program: BoundProgram) -> RolledProgram:
    """Fold `program` into one body for all layers. Raises NotRollableError with the first difference."""
    return _Folding(program).folded()


class _Folding:
    """One program's layers, their operations, and the index of each value within its layer."""

    def __init__(self, program: BoundProgram) -> None:
        self._program = program
        self._level: dict[str, int] = {}
        for name, checkpoint in program.weights.items():
            self._level[name] = starred(checkpoint)[1]
        self._count = 1 + max(self._level.values(), default=_PRELUDE)
        if self._count < 3:
            raise NotRollableError(f"it has {self._count} layers, and rolling pays for 3 or more")
        if len(program.cache) not in (0, 2 * self._count) or len(program.new_entries) != 2 * self._count:
            raise NotRollableError(f"it has {self._count} layers, but cache entries of {len(program.new_entries) // 2}")
        grouped(program.weights.values())
        self._level |= {name: i // 2 for i, name in enumerate(program.cache)}
        self._sides = {name: i % 2 for i, name in enumerate(program.cache)}
        self._operations: list[list[Operation]] = [[] for _ in range(self._count)]
        self._prelude: list[Operation] = []
        self._sort()
        self._offsets = [_offsets(operations) for operations in self._operations[:-1]]

    def _sort(self) -> None:
        """Assign each operation to its layer, and merge equal operations of the prelude."""
        alias: dict[str, str] = {}
        known: dict[Any, Operation] = {}
        for traced in self._program.operations:
            operation = _renamed(traced, alias)
            level = max((self._level.get(r, _PRELUDE) for r in operation.refs()), default=_PRELUDE)
            if level == _PRELUDE:
                key = (operation.operator, repr(operation.arguments), self._dtypes(operation))
                first = known.setdefault(key, operation)
                alias |= dict(zip(operation.outputs, first.outputs, strict=True))
                if first is operation:
                    self._prelude.append(operation)
            else:
                self._operations[level].append(operation)
            self._level |= dict.fromkeys(operation.outputs, level)

    def folded(self) -> RolledProgram:
        body = self._operations[_BODY]
        shapes = [self._shape(o) for o in body]
        leaves = [self._leaves(o, _BODY, self._offsets[_BODY]) for o in body]
        read: list[list[Sequence[str]]] = []
        for layer in range(self._count - 1):
            self._require_equal(layer, shapes, leaves)
            read.append([o.refs() for o in self._operations[layer]])
        last, offsets, epilogue = self._last(shapes, leaves)
        read.append([last[i].refs() if i in last else o.refs() for i, o in enumerate(body)])
        carries = self._carries(leaves, read[0], offsets)
        self._check_epilogue(epilogue, {c.last for c in carries})
        used = sorted({r for o in body for r in o.refs() if r in self._program.weights})
        return RolledProgram(
            self._count, tuple(self._prelude), tuple(body), tuple(epilogue), carries,
            {r: starred(self._program.weights[r])[0] for r in used if self._level[r] == _BODY},
            _varying(leaves, read), self._program.cache[2 * _BODY : 2 * _BODY + 2], self._new_entries(offsets),
        )  # fmt: skip

    def _require_equal(self, layer: int, shapes: Sequence[Any], leaves: Sequence[Sequence[_Leaf]]) -> None:
        operations = self._operations[layer]
        for i, operation in enumerate(operations[: len(shapes)]):
            own = self._leaves(operation, layer, self._offsets[layer])
            same = self._shape(operation) == shapes[i] and len(own) == len(leaves[i])
            if not same or any(not _agree(a, b, layer) for a, b in zip(own, leaves[i], strict=True)):
                raise NotRollableError(
                    f"operation {i} of layer {layer} ({operation.operator} → {operation.outputs[0]}) is not that of "
                    f"layer {_BODY} ({self._operations[_BODY][i].operator} → {self._operations[_BODY][i].outputs[0]})"
                )
        if len(operations) != len(shapes):
            raise NotRollableError(
                f"layer {layer} has {len(operations)} operations, where layer {_BODY} has {len(shapes)}"
            )

    def _last(
        self, shapes: Sequence[Any], leaves: Sequence[Sequence[_Leaf]]
    ) -> tuple[dict[int, Operation], dict[str, int], list[Operation]]:
        """The last layer's operations by their index in the body, its values' indices, and the epilogue."""
        layer = self._count - 1
        free: dict[Any, list[int]] = {}
        for i in reversed(range(len(shapes))):
            free.setdefault((shapes[i], tuple(leaves[i])), []).append(i)
        body, offsets, epilogue = self._operations[_BODY], dict[str, int](), list[Operation]()
        matched: dict[int, Operation] = {}
        for operation in self._operations[layer]:
            indices = free.get((self._shape(operation), tuple(self._leaves(operation, layer, offsets))))
            if not indices:
                epilogue.append(operation)
                continue
            index = indices.pop()
            matched[index] = operation
            at = (self._offsets[_BODY][name] for name in body[index].outputs)
            offsets |= dict(zip(operation.outputs, at, strict=True))
        return matched, offsets, epilogue

    def _carries(
        self, leaves: Sequence[Sequence[_Leaf]], first: Sequence[Sequence[str]], last: Mapping[str, int]
    ) -> tuple[Carry, ...]:
        before: dict[int, str] = {}
        for own, names in zip(leaves, first, strict=True):
            for leaf, name in zip(own, names, strict=True):
                if leaf[0] == "before" and before.setdefault(leaf[1], name) != name:
                    raise NotRollableError(
                        f"layer 0 reads {name} and {before[leaf[1]]} where layer {_BODY} reads one value"
                    )
        inside, after = ({p: name for name, p in self._offsets[layer].items()} for layer in (0, _BODY))
        ends = {p: name for name, p in last.items()}
        dtypes = self._program.dtypes
        for position, name in before.items():
            if dtypes[name] != dtypes[after[position]]:
                raise NotRollableError(f"layer 0 begins with {name}, of another dtype than what layers hand on")
        return tuple(Carry(before[p], inside[p], after[p], ends.get(p)) for p in sorted(before))

    def _check_epilogue(self, epilogue: Sequence[Operation], carried: set[str | None]) -> None:
        built = {name for operation in epilogue for name in operation.outputs}
        for operation in epilogue:
            for name in operation.refs():
                if self._level.get(name, _PRELUDE) != _PRELUDE and name not in built and name not in carried:
                    what = self._program.weights.get(name, name)
                    raise NotRollableError(
                        f"{operation.operator} → {operation.outputs[0]} of the last layer has no counterpart in layer "
                        f"{_BODY}, and reads {what}, which layers do not hand on"
                    )

    def _new_entries(self, last: Mapping[str, int]) -> tuple[str, str]:
        new = self._program.new_entries
        for layer in range(self._count):
            offsets = last if layer == self._count - 1 else self._offsets[layer]
            for side in (0, 1):
                name = new[2 * layer + side]
                if name not in offsets or offsets[name] != self._offsets[_BODY].get(new[2 * _BODY + side]):
                    what = ("keys", "values")[side]
                    raise NotRollableError(f"layer {layer} computes its new {what} differently from layer {_BODY}")
        return new[2 * _BODY], new[2 * _BODY + 1]

    def _dtypes(self, operation: Operation) -> tuple[int, ...]:
        return tuple(self._program.dtypes[name] for name in operation.outputs)

    def _shape(self, operation: Operation) -> Any:
        blank = _renamed(operation, dict.fromkeys(operation.refs(), ""))
        return operation.operator, operation.several, repr(blank.arguments), self._dtypes(operation)

    def _leaves(self, operation: Operation, layer: int, offsets: Mapping[str, int]) -> list[_Leaf]:
        return [self._leaf(name, layer, offsets) for name in operation.refs()]

    def _leaf(self, name: str, layer: int, offsets: Mapping[str, int]) -> _Leaf:
        level, dtype = self._level.get(name, _PRELUDE), self._program.dtypes[name]
        if level == _PRELUDE:
            return ("prelude", dtype)
        if level < layer - 1 or (level < layer and name not in self._offsets[level]):
            raise NotRollableError(f"layer {layer} reads {self._program.weights.get(name, name)} of layer {level}")
        if level == layer - 1:
            return ("before", self._offsets[level][name])
        if name in self._program.weights:
            return ("weight", starred(self._program.weights[name])[0], dtype)
        return ("cache", self._sides[name], dtype) if name in self._sides else ("here", offsets.get(name))


def _offsets(operations: Sequence[Operation]) -> dict[str, int]:
    return {name: i for i, name in enumerate(name for o in operations for name in o.outputs)}


def _agree(own: _Leaf, body: _Leaf, layer: int) -> bool:
    return own == body or (layer == 0 and own[0] == "prelude" and body[0] == "before")


def _varying(leaves: Sequence[Sequence[_Leaf]], read: Sequence[Sequence[Sequence[str]]]) -> dict[str, tuple[str, ...]]:
    """Values of the prelude, by the body's names, that differ between layers, to each layer's."""
    found: dict[str, tuple[str, ...]] = {}
    for i, own in enumerate(leaves):
        for j, leaf in enumerate(own):
            if leaf[0] == "prelude":
                names = tuple(layer[i][j] for layer in read)
                if found.setdefault(names[_BODY], names) != names:
                    raise NotRollableError(f"layers read {names[_BODY]} and others in its place in more than one way")
    return {name: names for name, names in found.items() if len(set(names)) > 1}


def _renamed(operation: Operation, names: Mapping[str, str]) -> Operation:
    def given(argument: Any) -> Any:
        if isinstance(argument, Ref):
            return Ref(names.get(argument.name, argument.name))
        return [given(a) for a in argument] if isinstance(argument, list) else argument

    return replace(operation, arguments={name: given(a) for name, a in operation.arguments.items()})


__all__ = ["NotRollableError", "RolledCore", "roll", "stacked_names"]


def roll(program: BoundProgram) -> RolledCore:
    """Roll `program` into one body for all its layers. Raises NotRollableError, saying where layers differ."""
    return RolledCore(program, fold(program))


class RolledCore:
    """A folded program. `weights` are the arguments that `stacked_names` lists, in its order, for every bucket."""

    def __init__(self, program: BoundProgram, folded: RolledProgram) -> None:
        self._program = program
        self._folded = folded
        self.weights = list(grouped(program.weights.values()))

    def run(self, given: Given, read: Read, weights: Sequence[Array]) -> CoreOutput:
        """Raises CompileError, also where layers read values of the prelude that differ in shape."""
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
        return CoreOutput(logits, tuple(top), (keys, news))


def _stack(arrays: Sequence[Array], names: Sequence[str]) -> Array:
    if len({a.shape for a in arrays}) > 1:
        shapes = ", ".join(f"{n} {list(a.shape)}" for n, a in zip(names, arrays, strict=True))
        raise CompileError(
            f"the layers cannot be rolled into one body: they read {shapes} in the same place; compile with "
            "--no-roll-layers"
        )
    return jnp.stack(arrays)
