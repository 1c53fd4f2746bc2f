"""Frames: whole however they arrive, and a short one by one call, as every request for a child is two of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.runtime.confined import frames
from tests.tiers import examples, full

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


TEXT, IDS = "é\ud800 " * frames.LONG, list(range(-5, frames.LONG))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.just(TEXT) | st.just(IDS),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@full
@examples(60, derandomize=True)
@given(VALUES)
def test_what_is_long_comes_back_where_it_stood(value: Any) -> None:
    assert read(Wire(frames.pack(value))) == value


@pytest.mark.parametrize("item", [True, 1 << 63, "1", None, 1.5])
def test_a_long_list_that_is_not_of_integers_is_plain_json(item: Any) -> None:
    value = [*IDS, item]
    back = read(Wire(frames.pack(value)))
    assert back == value
    assert type(back[-1]) is type(item)


@pytest.mark.parametrize("value", [{"texts": ["x" * (4 << 20)]}, {"done": [[[65] * 260_000, 260_000]]}])
def test_what_is_long_passes_by_jsons_reader_and_writer(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold the interpreter for 10 ms for it."""
    seen: list[int] = []
    dumps, loads = json.dumps, json.loads
    monkeypatch.setattr(json, "dumps", lambda *a, **k: seen.append(len(text := dumps(*a, **k))) or text)
    monkeypatch.setattr(json, "loads", lambda text: seen.append(len(text)) or loads(text))
    assert read(Wire(frames.pack(value))) == value
    assert len(seen) == 2 and max(seen) < 100


@pytest.mark.parametrize(
    ("value", "large"),
    [
        ({"messages": [{"role": "user", "content": "x" * 1000}] * 20, "tools": None}, False),
        ("x" * frames.LARGE, False),
        ("x" * (frames.LARGE + 1), True),
        ({"x" * (frames.LARGE + 1): 1}, True),
        ([[1]] * 2000, True),
        ([0] * (frames.LARGE + 1), True),
    ],
)
def test_a_large_value_is_known_without_looking_at_all_of_it(value: Any, large: bool) -> None:
    assert frames.is_large(value) is large


@pytest.mark.parametrize("cut", [0, 2, 4, 9])
def test_an_end_before_the_frame_is_no_value(cut: int) -> None:
    assert read(Wire(frames.pack(VALUE)[:cut])) is None


def test_what_stands_behind_a_frame_is_left_out_and_a_frame_beyond_the_bound_refused() -> None:
    assert read(Wire(frames.pack(VALUE) + frames.pack({"killed": 9}))) == VALUE
    with pytest.raises(ValueError, match="a frame of 4294967295 bytes"):
        read(Wire(b"\xff" * 8))
