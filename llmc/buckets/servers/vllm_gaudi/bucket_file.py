"""The file of VLLM_BUCKETING_FROM_FILE: written so that it lists just the buckets, and read as the server reads it.

    file  = line…
    line  = [ "(" axis "," axis "," axis ")" ] [ "#" comment ]       batch, query, context blocks; query 1 is decode
    axis  = number | "[" number, … "]" | "range(" start, stop [, step ] ")"       at most 10,000 numbers

Rules of vllm_gaudi/extension/bucketing/file_strategy.py, August 2026. A line that is none of these is skipped with a
warning there, or ends the server; it is an error here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from llmc.buckets.planner import bucket_file
from llmc.buckets.servers.base import Lists, Shape
from llmc.buckets.servers.vllm_gaudi.filters import DECODE, PROMPT
from llmc.errors import InputError

NAME = "buckets.txt"
MOST_OF_A_RANGE = 10_000
"""Numbers of the longest range that the server expands."""

_RANGE = re.compile(r"range\(([^)]*)\)")
_SHORTEST_RANGE = 4


def parse(text: str, source: str) -> Lists:
    """The buckets of a file's `text`, by family; `source` names it in messages.

    Raises InputError, naming source, line and column, for a line that the server would skip, or that would end it.
    """
    buckets = bucket_file.values(text, source)
    for number, line in enumerate(text.splitlines(), 1):
        code = line.partition("#")[0]
        rest = code
        for found in _RANGE.finditer(code):
            _check_range(found[1], f"{source}:{number}:{found.start() + 1}")
            rest = rest.replace(found[0], "0")
        if rest.count("(") > 1:
            column = rest.index("(", rest.index("(") + 1) + 1
            raise InputError(f"{source}:{number}:{column}: the server reads no tuple here; write a list, as in [1, 2]")
    return {
        PROMPT: tuple(sorted({bucket for bucket in buckets if bucket[1] != 1})),
        DECODE: tuple(sorted({bucket for bucket in buckets if bucket[1] == 1})),
    }


def _check_range(arguments: str, place: str) -> None:
    words = [word.strip() for word in arguments.split(",")]
    if len(words) < 2:
        raise InputError(f"{place}: the server skips a range of one number; write range(start, stop)")
    if all(word.isdigit() for word in words) and len(words) <= 3:
        start, stop, step = (*map(int, words), 1)[:3]
        if step and len(range(start, stop, step)) > MOST_OF_A_RANGE:
            raise InputError(
                f"{place}: the server skips a range of more than {MOST_OF_A_RANGE} numbers; raise its step"
            )


def write(lists: Lists, notes: Sequence[str] = ()) -> str:
    """A file that lists just the buckets of `lists`, behind `notes` as comments."""
    lines = [f"# {note}" for note in notes]
    for family, axes in ((PROMPT, "batch, query, context blocks of one sequence"),
                         (DECODE, "batch, 1, blocks of the whole batch")):  # fmt: skip
        lines.append(f"# {family}: {axes}")
        lines += _lines(lists[family])
    return "\n".join(lines) + "\n"


def _lines(shapes: Iterable[Shape]) -> list[str]:
    """One line for all batches and queries that have the same contexts, where their product is just the buckets."""
    contexts: dict[tuple[int, int], list[int]] = {}
    for batch, query, context in sorted(shapes):
        contexts.setdefault((batch, query), []).append(context)
    queries: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for (batch, query), blocks in contexts.items():
        queries.setdefault((batch, tuple(blocks)), []).append(query)
    batches: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for (batch, values), asked in queries.items():
        batches.setdefault((tuple(asked), values), []).append(batch)
    return [f"({_axis(rows)}, {_axis(asked)}, {_axis(values)})" for (asked, values), rows in batches.items()]


def _axis(values: Sequence[int]) -> str:
    """Numbers as one number, a range where they are many and evenly spaced, or a list."""
    if len(values) == 1:
        return str(values[0])
    step = values[1] - values[0]
    if _SHORTEST_RANGE <= len(values) <= MOST_OF_A_RANGE:
        even = range(values[0], values[-1] + 1, step)
        if list(even) == list(values):
            return f"range({values[0]}, {values[-1] + 1}" + (")" if step == 1 else f", {step})")
    return str(list(values))


def of(environment: Mapping[str, str], files: Mapping[str, str]) -> tuple[str, str] | None:
    """(name, text) of the file that VLLM_BUCKETING_FROM_FILE names, else of `NAME` or of the one .txt; None without.

    Raises InputError where the variable names a file that is not there.
    """
    named = environment.get("VLLM_BUCKETING_FROM_FILE")
    if not named:
        texts = [name for name in files if name.endswith(".txt")]
        name = NAME if NAME in files else texts[0] if len(texts) == 1 else None
        return None if name is None else (name, files[name])
    for name, text in files.items():
        if name == named or name.rpartition("/")[2] == named.rpartition("/")[2]:
            return name, text
    raise InputError(f"VLLM_BUCKETING_FROM_FILE names {named}, which is not there; give that file too")
