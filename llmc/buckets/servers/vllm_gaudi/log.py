"""What the server prints when it starts: the generated buckets, and one line for each that it warms up.

    INFO … Generated 36 prompt buckets [bs, query, num_blocks]: [(1, 128, 0), …]        vllm-gaudi, 2025 and 2026
    INFO … Generated 31 prompt buckets [bs, seq]: [(1, 128), …]                         HabanaAI's fork, 2024
    INFO … Generated 112 decode buckets [bs, total_blocks]: [(1, 128), …]
    INFO … [Warmup][Graph/prompt][1/36] batch_size:4 query_len:1024 num_blocks:0 free_mem:21.06 GiB

The lists as they were printed last are taken; the lines of warm-up where none was.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from llmc.buckets.servers.base import Lists, Shape
from llmc.buckets.servers.vllm_gaudi.filters import DECODE, PROMPT
from llmc.errors import InputError

_GENERATED = re.compile(r"Generated (\d{1,9}) (prompt|decode) buckets \[([a-z_, ]+)\]: \[(.*)")
_TUPLE = re.compile(r"\((\d{1,9}(?:, ?\d{1,9})*)\)")
_WARMUP = re.compile(
    r"\[Warmup\]\[(?:Graph/)?(prompt|decode)\]\[\d+/\d+\] "
    r"batch_size:(\d{1,9}) query_len:(\d{1,9}) num_blocks:(\d{1,9})\b",
    re.I,
)


def parse(lines: Iterable[str]) -> Lists | None:
    """The lists that `lines` of a log state, or None where a family has none.

    Raises InputError for a printed list that is not whole.
    """
    generated: dict[str, tuple[Shape, ...]] = {}
    warmed: dict[str, set[Shape]] = {}
    for number, line in enumerate(lines, 1):
        if match := _GENERATED.search(line):
            generated[match[2]] = _generated(match, number)
        elif match := _WARMUP.search(line):
            warmed.setdefault(match[1].lower(), set()).add((int(match[2]), int(match[3]), int(match[4])))
    found = {family: generated.get(family) or tuple(sorted(warmed.get(family, ()))) for family in (PROMPT, DECODE)}
    return found if all(found.values()) else None


def _generated(match: re.Match[str], number: int) -> tuple[Shape, ...]:
    count, family, names = int(match[1]), match[2], [name.strip() for name in match[3].split(",")]
    rows = [tuple(map(int, row.split(","))) for row in _TUPLE.findall(match[4])]
    if len(rows) != count or any(len(row) != len(names) for row in rows):
        raise InputError(f"line {number}: {count} {family} buckets were generated, but the line lists {len(rows)} of "
                         f"{', '.join(names)}; give the whole line")  # fmt: skip
    if len(names) == 3:
        return tuple(sorted(set(rows)))
    if family == PROMPT:
        return tuple(sorted({(batch, query, 0) for batch, query in rows}))
    return tuple(sorted({(batch, 1, blocks) for batch, blocks in rows}))
