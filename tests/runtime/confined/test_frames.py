"""Frames: whole however they arrive, and a short one by one call, as every request for a child is two of them."""

from __future__ import annotations

from typing import Any

import pytest

from llmc.runtime.confined import frames

VALUE = {"done": "é\ud800 " * 9, "bytes": [1, None, 2.5]}


class Wire:
    """A socket's end that gives `data` in parts of at most `most` bytes."""

    def __init__(self, data: bytes, most: int = 1 << 30) -> None:
        self.data, self.most, self.calls = data, most, 0

    def recv(self, size: int) -> bytes:
        self.calls += 1
        size = min(size, self.most)
        part, self.data = self.data[:size], self.data[size:]
        return part


def read(wire: Any) -> Any:
    return frames.read(wire)


def test_a_short_frame_takes_one_call() -> None:
    wire = Wire(frames.pack(VALUE))
    assert read(wire) == VALUE
    assert wire.calls == 1


@pytest.mark.parametrize("most", [1, 3, 5, 4096])
def test_a_frame_is_whole_however_it_arrives(most: int) -> None:
    assert read(Wire(frames.pack(VALUE), most)) == VALUE
    long = ["x" * 200_000]
    assert read(Wire(frames.pack(long), 70_000)) == long


@pytest.mark.parametrize("cut", [0, 2, 4, 9])
def test_an_end_before_the_frame_is_no_value(cut: int) -> None:
    assert read(Wire(frames.pack(VALUE)[:cut])) is None


def test_what_stands_behind_a_frame_is_left_out_and_a_frame_beyond_the_bound_refused() -> None:
    assert read(Wire(frames.pack(VALUE) + frames.pack({"killed": 9}))) == VALUE
    with pytest.raises(ValueError, match="a frame of 4294967295 bytes"):
        read(Wire(b"\xff" * 8))
