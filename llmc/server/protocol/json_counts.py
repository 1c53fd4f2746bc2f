"""What a body holds, counted in its bytes before any of it is read.

The bytes are looked at in pieces of PIECE: what works on all of a body at once holds the interpreter, or takes fresh
memory of many times its size, and either one stalls every stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from llmc.errors import InputError
from llmc.server.protocol.bounds import MAX_CONTAINERS, MAX_DEPTH, MAX_MEMBERS, MAX_VALUES

PIECE = 1 << 16


@dataclass
class Counts:
    """`commas`, `members` of objects, `containers` (lists and objects), how `deep` these are, and whether
    a backslash is there."""

    commas: int = 0
    members: int = 0
    containers: int = 0
    deep: int = 0
    escapes: bool = False

    @property
    def values(self) -> int:
        """Elements and members, and what holds them."""
        return self.commas + self.containers


def check_counts(raw: bytes) -> Counts:
    """The counts of `raw`, those in texts included unless all together would be too much.

    Raises InputError where `raw` has too many values, members, or lists and objects, or too deep ones.
    """
    counts = _roughly(raw)
    if not _too_much(counts):
        return counts
    counts = _outside_texts(raw, counts.escapes)
    if counts.deep > MAX_DEPTH:
        raise InputError(f"the body is nested more than {MAX_DEPTH} deep")
    if too_much := _too_much(counts):
        raise InputError(too_much)
    return counts


def outside_texts(raw: bytes) -> Counts:
    """The counts of `raw` without what stands in texts."""
    return _outside_texts(raw, b"\\" in raw)


def _too_much(counts: Counts) -> str:
    if counts.containers > MAX_CONTAINERS:
        return f"the body has {counts.containers} lists and objects; at most {MAX_CONTAINERS} are taken"
    if counts.members > MAX_MEMBERS:
        return f"the body's objects have {counts.members} members; at most {MAX_MEMBERS} are taken"
    if counts.values > MAX_VALUES:
        return f"the body has {counts.values} values; at most {MAX_VALUES} are taken"
    return ""


def _roughly(raw: bytes) -> Counts:
    counts = Counts()
    for start in range(0, len(raw), PIECE):
        piece = raw[start : start + PIECE]
        counts.commas += piece.count(b",")
        counts.members += piece.count(b":")
        counts.containers += piece.count(b"[") + piece.count(b"{")
        counts.escapes = counts.escapes or b"\\" in piece
    return counts


def _outside_texts(raw: bytes, escapes: bool) -> Counts:
    counts, in_text, depth = Counts(escapes=escapes), False, 0
    for piece in _unescaped(raw) if escapes else _pieces(raw):
        data = np.frombuffer(piece, np.uint8)
        texts = np.bitwise_xor.accumulate(data == ord('"')) ^ in_text
        if not len(texts):
            continue
        in_text = bool(texts[-1])
        data = data[~texts]
        opened = (data == ord("[")) | (data == ord("{"))
        closed = (data == ord("]")) | (data == ord("}"))
        counts.commas += int(np.count_nonzero(data == ord(",")))
        counts.members += int(np.count_nonzero(data == ord(":")))
        if found := int(np.count_nonzero(opened)):
            depths = (opened.view(np.int8) - closed.view(np.int8)).cumsum(dtype=np.int32)
            counts.containers += found
            counts.deep = max(counts.deep, depth + int(depths.max()))
        depth += found - int(np.count_nonzero(closed))
    return counts


def _pieces(raw: bytes) -> Iterator[bytes]:
    for start in range(0, len(raw), PIECE):
        yield raw[start : start + PIECE]


def _unescaped(raw: bytes) -> Iterator[bytes]:
    """Pieces without escaped backslashes and quotes. A backslash that ends a piece escapes what begins the next."""
    rest = b""
    for piece in _pieces(raw):
        left = (rest + piece).replace(b"\\\\", b"")
        rest = b"\\" if left.endswith(b"\\") else b""
        yield left.removesuffix(rest).replace(b'\\"', b"")
