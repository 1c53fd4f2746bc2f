"""Collectives of a compiled program: counts and bytes by kind, from HLO text.

HLO text is the output of `compiled.as_text()`: computations, `NAME (parameters) -> shape {`, of instructions, `%name =
shape opcode(operands), attributes`, with shapes like `f32[3,1,64]{2,1,0:T(8,128)}` or tuples of shapes (XLA's
HloModule::ToString). Bytes are those of the result on one device, without a layout's padding.

An asynchronous collective, a pair of `…-start` and `…-done`, counts once. A collective in a loop's body counts once
however often the loop runs, and also under `in_loop`. Text that is not HLO has no collectives.
"""

from __future__ import annotations

import math
import re
from typing import TypedDict

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
"""The counted opcodes, in addition to their `-start` forms."""


class Collectives(TypedDict):
    """All collectives of one kind."""

    count: int
    bytes: int
    """Bytes of all results on one device."""
    in_loop: int
    """The part of `count` that is in a loop, and runs once an iteration."""


def collectives(hlo: str) -> dict[str, Collectives]:
    """Count each kind of collective that occurs in `hlo`, in the order of KINDS."""
    computations = _computations(hlo)
    looped = _looped(computations)
    found: dict[str, Collectives] = {}
    for computation, instructions in computations.items():
        for shape, opcode, _ in instructions:
            kind = opcode.removesuffix("-start")
            if kind in KINDS:
                row = found.setdefault(kind, {"count": 0, "bytes": 0, "in_loop": 0})
                row["count"] += 1
                row["bytes"] += sum(_bytes(array) for array in _ARRAY.finditer(_result(shape, opcode)))
                row["in_loop"] += computation in looped
    return {kind: found[kind] for kind in KINDS if kind in found}


_Instruction = tuple[str, str, str]
"""Shape, opcode, and the rest."""

_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?[\w.\-]+ = (.+)")
_OPCODE = re.compile(r"\s*([a-z][a-z0-9\-]*)\(")
_COMMENT = re.compile(r"/\*.*?\*/")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|(?:true|false|branch|called)_computations?)=(%?[\w.\-]+|\{[^}]*\})"
)
_ARRAY = re.compile(r"\b(?:(pred)|[a-z]+(\d+)\w*)\[([\d,<=]*)\]")


def _computations(hlo: str) -> dict[str, list[_Instruction]]:
    built: dict[str, list[_Instruction]] = {}
    current = built.setdefault("", [])
    for line in hlo.splitlines():
        if header := _COMPUTATION.match(line):
            current = built.setdefault(header[1], [])
        elif instruction := _INSTRUCTION.match(line):
            text = _COMMENT.sub("", instruction[1])
            shape, rest = _shape_first(text)
            if opcode := _OPCODE.match(rest):
                current.append((shape, opcode[1], rest[opcode.end() :]))
    return built


def _shape_first(text: str) -> tuple[str, str]:
    """The shape at the start of `text`, which may hold blanks inside brackets, and the rest."""
    depth = 0
    for index, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character == " " and depth == 0:
            return text[:index], text[index:]
    return text, ""


def _looped(computations: dict[str, list[_Instruction]]) -> set[str]:
    """Bodies and conditions of loops, and all that they call."""
    every = [i for instructions in computations.values() for i in instructions]
    waiting = [name for _, opcode, rest in every if opcode == "while" for name in _called(rest)]
    looped: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in looped:
            looped.add(name)
            waiting += [called for _, _, rest in computations.get(name, []) for called in _called(rest)]
    return looped


def _called(rest: str) -> list[str]:
    return [name.strip(" %") for match in _CALLED.finditer(rest) for name in match[1].strip("{}").split(",")]


def _result(shape: str, opcode: str) -> str:
    """The result's part of an instruction's shape.

    `-start` returns (operands, results, contexts…), except all-reduce-start, which has the shape of its result.
    """
    if not opcode.endswith("-start") or not shape.startswith("("):
        return shape
    if opcode == "all-reduce-start" and not shape.startswith("(("):
        return shape
    parts: list[str] = [""]
    depth = 0
    for character in shape[1:-1]:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts[1] if len(parts) > 1 else parts[0]


def _bytes(array: re.Match[str]) -> int:
    boolean, bits, dims = array.groups()
    elements = math.prod(int(d.lstrip("<=")) for d in dims.split(",") if d)
    return elements if boolean else -(-elements * int(bits) // 8)
