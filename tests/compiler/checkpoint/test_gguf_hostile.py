"""Hostile GGUF files: each ends at once in one error that names the file and what is wrong."""

from __future__ import annotations

import re
import struct
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest

from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.checkpoint.gguf_file import read_header
from llmc.errors import CheckpointError
from tests.compiler.checkpoint.writers import BLOCK_KINDS, scale_offsets, write_blocks

U32, STRING, ARRAY = 4, 8, 9
MOST = 2**63
Q4_K = int(gguf.GGMLQuantizationType.Q4_K)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, values: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + values


def tensor(name: bytes, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def file(pairs: list[bytes], tensors: list[bytes], data: int = 4096) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs)) + b"".join([*pairs, *tensors])
    return head + bytes(-len(head) % 32 + data)


def nested(depth: int) -> bytes:
    return array(ARRAY, 1, nested(depth - 1)) if depth else array(U32, 1, bytes(4))


CASES = {
    "a key of 2^63 bytes": (file([struct.pack("<QI", MOST, U32)], []), "a metadata key of 9223372036854775808 bytes"),
    "a text of 2^63 bytes": (file([pair(b"a", STRING, struct.pack("<Q", MOST))], []), "the value of a"),
    "a text of 2^64 - 1 bytes": (file([pair(b"a", STRING, b"\xff" * 8)], []), "the value of a"),
    "2^63 numbers": (file([pair(b"a", ARRAY, array(U32, MOST))], []), "a list of 9223372036854775808 values in a"),
    "2^63 texts": (file([pair(b"a", ARRAY, array(STRING, MOST))], []), "a list of 9223372036854775808 strings in a"),
    "texts of 2^63 bytes in a list": (
        file([pair(b"a", ARRAY, array(STRING, 3, struct.pack("<Q", MOST)))], []), "the strings of a",
    ),
    "a list in a list": (file([pair(b"a", ARRAY, nested(1))], []), "a is an array of type 9"),
    "lists 10,000 deep": (file([pair(b"a", ARRAY, b"".join([array(ARRAY, 1)] * 10_000))], []), "an array of type 9"),
    "a value of a type that there is not": (file([pair(b"a", 13, bytes(8))], []), "value of a has type 13"),
    "a key twice": (file([pair(b"a", U32, bytes(4))] * 2, []), "metadata key a occurs twice"),
    "2^63 pairs": (b"GGUF" + struct.pack("<IQQ", 3, 0, MOST) + bytes(64), "a list of 9223372036854775808 metadata"),
    "2^63 tensors": (b"GGUF" + struct.pack("<IQQ", 3, MOST, 0) + bytes(64), "tensors"),
    "a name of 2^63 bytes": (file([], [struct.pack("<QI", MOST, 1)]), "a tensor name of 9223372036854775808 bytes"),
    "a tensor type that there is not": (file([], [tensor(b"t", (32,), 31)]), "t has quantisation type 31; supported: "),
    "a tensor of 2^32 - 1 dimensions": (file([], [text(b"t") + b"\xff" * 4]), "'t' has 4294967295 dimensions"),
    "a tensor of none": (file([], [text(b"t") + bytes(4)]), "'t' has 0 dimensions"),
    "a side of 2^63": (file([], [tensor(b"t", (MOST, MOST, MOST, MOST))]), "tensor t"),
    "a side of 0": (file([], [tensor(b"t", (32, 0))]), "not whole blocks"),
    "an offset behind the end": (file([], [tensor(b"t", (32,), 0, 8192)]), "tensor t"),
    "an offset of 2^64 - 32": (file([], [tensor(b"t", (32,), 0, 2**64 - 32)]), "tensor t"),
    "a tensor over the end": (file([], [tensor(b"t", (1024,), 0, 32)]), "tensor t"),
    "tensors in one place": (file([], [tensor(b"t", (32,)), tensor(b"u", (32,))]), "overlaps another"),
    "tensors that overlap": (file([], [tensor(b"t", (32,)), tensor(b"u", (8,), 0, 96)]), "tensor u overlaps another"),
    "an odd offset": (file([], [tensor(b"t", (32,), 0, 4)]), "misaligned"),
    "a tensor twice": (file([], [tensor(b"t", (8,)), tensor(b"t", (8,), 0, 32)]), "is a duplicate"),
    **{
        f"rows of {kind} that are not whole blocks": (
            file([], [tensor(b"t", (128, 2), int(gguf.GGMLQuantizationType[kind]))]), f"{kind} [2, 128] at 0",
        )
        for kind in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ2_XXS", "TQ1_0")
    },
    **{
        f"rows of {kind} that are not whole blocks": (
            file([], [tensor(b"t", (48, 2), int(gguf.GGMLQuantizationType[kind]))]), f"{kind} [2, 48] at 0",
        )
        for kind in ("Q4_0", "Q5_0", "Q5_1", "IQ4_NL")
    },
}  # fmt: skip


@pytest.mark.parametrize("case", list(CASES))
def test_it_is_refused_at_once(case: str, tmp_path: Path) -> None:
    """In no time, and with no memory for what the file only claims to hold."""
    data, message = CASES[case]
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    begun = time.process_time()
    try:
        with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
            read_header(path)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert time.process_time() - begun < 1
    assert str(path) in str(caught.value)


NAME = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_numbers_of_a_block_that_are_not_finite_are_named(kind: str, bad: float, tmp_path: Path) -> None:
    """The scale, and the minimum of types that have one, in floats and in blocks."""
    path = tmp_path / "m.gguf"
    write_blocks(path, {"": kind})
    whole = path.read_bytes()
    info = read_header(path).tensors["blk.0.ffn_down.weight"]
    for at in scale_offsets(kind):
        damaged = bytearray(whole)
        damaged[info.offset + at : info.offset + at + 2] = struct.pack("<e", bad)
        path.write_bytes(damaged)
        checkpoint = open_checkpoint(path)
        for ask in (checkpoint.tensor, checkpoint.quantised_blocks):
            with pytest.raises(CheckpointError, match=rf"{re.escape(NAME)}.* non-finite") as caught:
                ask(NAME)
            assert str(path) in str(caught.value)


@pytest.mark.parametrize(("kind", "message"), [("Q6_K", "overlaps another"), ("IQ4_XS", "belong to no tensor")])
def test_a_matrix_that_is_said_to_be_of_another_type_is_refused(kind: str, message: str, tmp_path: Path) -> None:
    """Its bytes are fewer, or more, than the type takes."""
    path = tmp_path / "m.gguf"
    write_blocks(path, {"": "Q4_K"})
    whole = bytearray(path.read_bytes())
    name = text(b"blk.0.ffn_down.weight")
    at = whole.index(name) + len(name) + 4 + 2 * 8
    assert struct.unpack_from("<I", whole, at) == (Q4_K,)
    struct.pack_into("<I", whole, at, int(gguf.GGMLQuantizationType[kind]))
    path.write_bytes(whole)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)
