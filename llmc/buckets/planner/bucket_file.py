"""Bucket files in the format of VLLM_BUCKETING_FROM_FILE.

    file  = line…
    line  = [ spec ] [ "#" comment ]
    spec  = "(" axis "," axis "," axis ")"                      batch, query, context; query 1 means decode
    axis  = number | "[" number, … "]" | "range(" [ start, ] stop [ , step ] ")"

A spec stands for the product of its three axes. Lists may be written as tuples, and the outer parentheses left out.
Lines are parsed and never evaluated.
"""

from __future__ import annotations

import ast
import io
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn, get_args

from llmc.buckets.bucket import PHASES, Bucket, Phase
from llmc.buckets.limits import Limits
from llmc.buckets.plan import MAX_BUCKETS, Note
from llmc.errors import InputError

ContextUnit = Literal["tokens", "blocks"]
"""Unit of a file's contexts: tokens of one sequence, or KV cache blocks as in the vendor's planner."""


@dataclass(frozen=True)
class BucketFile:
    """A file of bucket specs; `origin` records how the user named it.

    With `unit` None, the unit of its contexts is recognised from its numbers (`recognise`).
    """

    path: str
    unit: ContextUnit | None = None
    origin: str = "flag"


class FileBucket(NamedTuple):
    """One bucket of a file, in the file's unit; `line` and `column` of its spec count from 1."""

    batch: int
    query: int
    context: int
    line: int
    column: int

    @property
    def phase(self) -> Phase:
        """A query of 1 is a decode bucket, any other a prompt bucket."""
        return "decode" if self.query == 1 else "prompt"

    def __str__(self) -> str:
        return f"({self.batch}, {self.query}, {self.context})"


def recognise(listed: Sequence[FileBucket], source: str, limits: Limits) -> ContextUnit:
    """Return the unit of the contexts in `listed`, recognised from its numbers.

    The vendor's files (VLLM_BUCKETING_FROM_FILE) look alike and count KV cache blocks: of one sequence in a prompt
    bucket, of the whole batch in a decode bucket. Read as tokens, such a file would give contexts a hundred times too
    small. A unit is therefore used only if the other one is impossible:

        blocks    a context is above max_model_len, and read as blocks some decode bucket lies within it
        tokens    every context is a multiple of block_size or max_model_len itself, one decode context holds the
                  longest sequence, and read as blocks some decode bucket lies beyond max_model_len

    Raises InputError, naming the flag, where both are possible.
    """
    contexts = [spec.context for spec in listed if spec.context]
    decode = [spec for spec in listed if spec.phase == "decode" and spec.context]
    beyond = [spec for spec in decode if (blocks_each(spec) - 1) * limits.block_size >= limits.max_model_len]
    if not decode:
        return "tokens"
    if max(contexts) > limits.max_model_len:
        if len(beyond) < len(decode):
            return "blocks"
    elif (
        beyond
        and max(spec.context for spec in decode) >= limits.longest_past
        and all(context % limits.block_size == 0 or context >= limits.longest_past for context in contexts)
    ):
        return "tokens"
    example = max(decode, key=lambda spec: spec.context)
    blocks = blocks_each(example) * limits.block_size
    raise InputError(
        f"{source}: its contexts may count tokens of one sequence, or KV cache blocks of {limits.block_size} tokens as "
        f"vLLM's bucket files do ({example} is {example.context} or {blocks} tokens a sequence); give "
        "--context-unit tokens, or --context-unit blocks"
    )


def blocks_each(spec: FileBucket) -> int:
    """Return the blocks per sequence where contexts count blocks; a decode bucket's count is for its whole batch."""
    return -(-spec.context // spec.batch) if spec.phase == "decode" else spec.context


MAX_NUMBER = (1 << 31) - 1
MAX_LINE = 10_000
"""Most characters of a line."""

MAX_FILE = 16 << 20
"""Most bytes of a file, and most characters of a text."""

_MAX_DIGITS = 20
_AXES = (("batch", 1), ("query", 1), ("context", 0))
_EXAMPLE = "write (batch, query, context), each a number, a list or range(start, stop, step)"
_TOKEN = re.compile(r"[ \t]+|range\b|[0-9_]+|[()\[\],-]")


class _Location(NamedTuple):
    source: str
    line: int
    indent: int

    def fail(self, column: int, message: str) -> NoReturn:
        """Raise InputError at `column`, which counts from 0 after the indent."""
        raise InputError(f"{self.source}:{self.line}:{self.indent + column + 1}: {message}")


def parse(text: str, source: str) -> list[FileBucket]:
    """Return the buckets that `text` lists, in its order; `source` names it in messages.

    Raises InputError, naming source, line and column, for a line that is not a spec, an axis without values, a number
    that is negative, too small for its axis or above `MAX_NUMBER`, more than `MAX_BUCKETS` buckets in total, and more
    than `MAX_LINE` characters in a line or `MAX_FILE` in total. No text raises any other error.
    """
    if len(text) > MAX_FILE:
        raise InputError(f"{source}: has more than {MAX_FILE} characters; a bucket file is far smaller")
    found: list[FileBucket] = []
    for number, line in enumerate(io.StringIO(text, newline=None), 1):
        if len(line.rstrip("\n")) > MAX_LINE:
            raise InputError(f"{source}:{number}:{MAX_LINE + 1}: more than {MAX_LINE} characters; split the line")
        code = line.partition("#")[0].rstrip()
        spec = code.lstrip()
        location = _Location(source, number, len(code) - len(spec))
        if not spec:
            continue
        axes = _axes(spec, location)
        size = len(axes[0]) * len(axes[1]) * len(axes[2])
        if len(found) + size > MAX_BUCKETS:
            location.fail(0, f"these {size} buckets make more than {MAX_BUCKETS} in all; list fewer")
        found += (
            FileBucket(batch, query, context, number, location.indent + 1) for batch, query, context in product(*axes)
        )
    return found


def values(text: str, source: str = "buckets") -> list[tuple[int, int, int]]:
    """Return (batch, query, context) of every bucket in `text`, in order and unit. Raises InputError like `parse`."""
    return [(found.batch, found.query, found.context) for found in parse(text, source)]


def buckets(text: str, source: str, limits: Limits, unit: ContextUnit | None) -> tuple[list[Bucket], list[Note]]:
    """Return the ascending buckets that `text` lists, and notes on changes from converting blocks.

    A spec with query 1 is a decode bucket, any other a prompt bucket, as in the vendor's planner; a prompt bucket with
    query 1 therefore cannot be written. With unit "blocks", a prompt context counts the blocks of one sequence. A
    decode context counts those of the whole batch, so each sequence gets ceil(context / batch) blocks. Neither grows
    above max_model_len, and duplicates that result are kept once. Without a unit (None), it is recognised from the
    numbers (`recognise`).

    Raises InputError like `parse`, for a bucket beyond a limit, for a duplicate, for a phase without buckets, for an
    unknown unit, and for numbers that fit either unit.
    """
    if unit is not None and unit not in get_args(ContextUnit):
        raise InputError(f"unit {unit!r} is not one of {', '.join(get_args(ContextUnit))}")
    listed = parse(text, source)
    unit = unit or recognise(listed, source, limits)
    seen: dict[tuple[int, int, int], FileBucket] = {}
    found: dict[Bucket, None] = {}
    cut: list[FileBucket] = []
    for spec in listed:
        location = f"{source}:{spec.line}:{spec.column}"
        earlier = seen.setdefault(spec[:3], spec)
        if earlier is not spec:
            raise InputError(f"{location}: {spec} is listed before, in line {earlier.line}; remove one of the two")
        context = spec.context
        if unit == "blocks":
            blocks = blocks_each(spec)
            context = min(blocks * limits.block_size, limits.max_model_len)
            if (blocks - 1) * limits.block_size >= limits.max_model_len:
                cut.append(spec)
        bucket = Bucket(spec.phase, spec.batch, spec.query, context)
        exceeded = limits.exceeded_by(bucket)
        if exceeded:
            raise InputError(f"{location}: {spec}: {exceeded}; lower it or raise the limit")
        found[bucket] = None
    for phase in PHASES:
        if not any(bucket.phase == phase for bucket in found):
            query = "query 1" if phase == "decode" else "a query above 1"
            raise InputError(f"{source}: lists no {phase} bucket; add one, with {query}")
    return sorted(found), _notes(listed, found, cut, limits)


def load(path: str | os.PathLike[str], limits: Limits, unit: ContextUnit | None) -> tuple[list[Bucket], list[Note]]:
    """Return `buckets` of the UTF-8 file at `path`.

    Raises InputError like `buckets`, and when the file cannot be read or has more than `MAX_FILE` bytes.
    """
    source = os.fspath(path)
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE + 1)
        text = data.decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the bucket file {source}: {error}") from None
    if len(data) > MAX_FILE:
        raise InputError(f"{source}: has more than {MAX_FILE} bytes; a bucket file is far smaller")
    return buckets(text, source, limits, unit)


def _axes(spec: str, location: _Location) -> list[Sequence[int]]:
    end = 0
    while end < len(spec):
        token = _TOKEN.match(spec, end)
        if token is None:
            location.fail(end, f"{spec[end]!r} is not allowed in a bucket; {_EXAMPLE}")
        if len(token[0]) > _MAX_DIGITS and token[0][0].isdigit():
            location.fail(end, f"this number is above {MAX_NUMBER}; no server runs it")
        if len(token[0]) > 1 and token[0][0] == "0":
            location.fail(end, f"number {token[0]} has leading zeros; leave them out")
        end = token.end()
    try:
        node = ast.parse(spec, mode="eval").body
    except SyntaxError as error:
        location.fail(min(max((error.offset or 1) - 1, 0), len(spec)), f"{error.msg}; {_EXAMPLE}")
    except (ValueError, RecursionError, MemoryError):
        location.fail(0, f"this is nested too deeply; {_EXAMPLE}")
    if not isinstance(node, ast.Tuple):
        location.fail(node.col_offset, f"this is not a bucket; {_EXAMPLE}")
    if len(node.elts) != len(_AXES):
        location.fail(node.col_offset, f"this has {len(node.elts)} entries instead of 3; {_EXAMPLE}")
    return [_axis(entry, name, least, location) for entry, (name, least) in zip(node.elts, _AXES, strict=True)]


def _axis(node: ast.expr, name: str, least: int, location: _Location) -> Sequence[int]:
    """The numbers of one axis; at least one, none below `least`."""
    if isinstance(node, ast.Tuple | ast.List):
        if not node.elts:
            location.fail(node.col_offset, f"this list gives the {name} no value; put one in")
        return [_number(entry, name, least, location) for entry in node.elts]
    if isinstance(node, ast.Call):
        return _range(node, name, least, location)
    return [_number(node, name, least, location)]


def _range(node: ast.Call, name: str, least: int, location: _Location) -> range:
    if not isinstance(node.func, ast.Name) or not 1 <= len(node.args) <= 3:
        location.fail(node.col_offset, f"this is not a range; write the {name} as range(start, stop, step), of numbers")
    if len(node.args) == 1:
        start, stop, step = 0, _number(node.args[0], name, 0, location), 1
    else:
        start = _number(node.args[0], name, 0, location)
        stop = _number(node.args[1], name, 0, location)
        step = _number(node.args[2], f"{name} step", 1, location) if len(node.args) == 3 else 1
    numbers = range(start, stop, step)
    if not numbers:
        location.fail(node.col_offset, f"range({start}, {stop}, {step}) gives the {name} no value; raise its stop")
    if start < least:
        location.fail(node.col_offset, f"{name} {start} must be at least {least}; start the range there")
    return numbers


def _number(node: ast.expr, name: str, least: int, location: _Location) -> int:
    if isinstance(node, ast.UnaryOp):
        location.fail(node.col_offset, f"the {name} must not be negative")
    if not isinstance(node, ast.Constant) or type(node.value) is not int:
        location.fail(node.col_offset, f"this is not a number; {_EXAMPLE}")
    if node.value < least:
        location.fail(node.col_offset, f"{name} {node.value} must be at least {least}")
    if node.value > MAX_NUMBER:
        location.fail(node.col_offset, f"this {name} is above {MAX_NUMBER}; no server runs it")
    return node.value


def _notes(listed: list[FileBucket], found: dict[Bucket, None], cut: list[FileBucket], limits: Limits) -> list[Note]:
    notes = []
    for phase in PHASES:
        equal = sum(spec.phase == phase for spec in listed) - sum(bucket.phase == phase for bucket in found)
        if equal:
            text = "equal to another one of the file once its blocks are counted in tokens per sequence"
            notes.append(Note("dropped", text, phase, equal))
        count = sum(spec.phase == phase for spec in cut)
        if count:
            text = f"{count} in the bucket file with a context above max_model_len {limits.max_model_len}, cut to it"
            notes.append(Note("warning", text, phase))
    return notes
