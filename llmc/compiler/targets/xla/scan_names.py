"""Names of the weights of a rolled program: those of all layers are one stacked array, named with `*` for the layer.

A layer's weight is one whose name has a component that is a number: "model.layers.3.mlp.up_proj.weight" is layer 3's
"model.layers.*.mlp.up_proj.weight"; further numbers, of experts say, stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

_NUMBERED = re.compile(r"((?:[^.]+\.)*?)([0-9]+)(\..+)")


class NotRollableError(ValueError):
    """The layers of a program cannot share one body; the message says why."""


def starred(name: str) -> tuple[str, int]:
    """The name with `*` for the layer, and the layer; −1 for a weight of none, whose name stays as it is."""
    found = _NUMBERED.fullmatch(name)
    return (f"{found[1]}*{found[3]}", int(found[2])) if found else (name, -1)


def grouped(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The arguments of a rolled program, sorted by name, and the weights that each stacks, in the order of layers.

    Raises NotRollableError where some layer lacks a weight that another has, or where there are two stacks of layers.
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
    """The arguments of a rolled program over `weights` (shapes by name), in order, and what each is made of.

    "a.*.b" → ("a.0.b", "a.1.b", …), to be stacked along a new first axis; any other weight → itself alone, as it is.
    The order depends on nothing but the names. Raises NotRollableError where layers differ in their weights or shapes.
    """
    arguments = grouped(weights)
    for sources in arguments.values():
        for name in sources[1:]:
            if tuple(weights[name]) != tuple(weights[sources[0]]):
                raise NotRollableError(
                    f"{name} is {list(weights[name])}, where {sources[0]} is {list(weights[sources[0]])}"
                )
    return arguments
