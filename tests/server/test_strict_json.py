"""Bodies that are JSON, and all the ways in which they may not be."""

from __future__ import annotations

import json
import math
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.errors import InputError
from llmc.server.protocol import json_counts
from llmc.server.protocol.json_counts import PIECE, Counts, check_counts, outside_texts
from llmc.server.protocol.strict_json import LONG, MAX_DEPTH, loads
from tests.tiers import examples

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)

TRAPS = {
    b'{"a": NaN}': "NaN",
    b"[Infinity]": "Infinity",
    b"[-Infinity]": "-Infinity",
    b"[1e400]": "too large",
    b"[-1e999]": "too large",
    b"1" * 5000: "digits",
    b"[" * 100_000: "nested",
    b'{"a":' * 100_000: "nested",
    b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1): "nested",
    b'{"a": 1, "a": 2}': "'a' twice",
    b'{"b": {"a": 1, "c": [], "a": 2}}': "'a' twice",
    rb'["\ud800"]': "surrogate",
    rb'{"\udfff": 1}': "surrogate",
    rb'["\ud83d\u0041"]': "surrogate",
    b'["\xff"]': "UTF-8",
    b'["\xed\xa0\x80"]': "UTF-8",
    '["a"]'.encode("utf-16"): "UTF-8",
    b"\xef\xbb\xbf[]": "BOM",
    b"": "line 1",
    b"[1,]": "line 1",
    b"{'a': 1}": "line 1",
    b'["\n"]': "control character",
    b"[] []": "Extra data",
    b"[01]": "line 1",
}


@pytest.mark.parametrize("raw", TRAPS, ids=[f"{raw[:24]!r}" for raw in TRAPS])
def test_refuses_what_is_not_json_or_would_break_later(raw):
    with pytest.raises(InputError, match=TRAPS[raw]) as caught:
        loads(raw)
    assert "\n" not in str(caught.value)


@examples(60, derandomize=True)
@given(VALUES, st.booleans())
def test_reads_whatever_json_writes(value, ascii_only):
    assert loads(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@examples(300, derandomize=True)
@given(st.binary(max_size=40) | st.text('[]{}",:0123456789.eE+-\\undfalsetrN ', max_size=30).map(str.encode))
def test_gives_a_value_or_an_input_error_for_any_bytes(raw):
    try:
        value = loads(raw)
    except InputError:
        return
    json.dumps(value, allow_nan=False, ensure_ascii=False).encode()


def test_takes_the_deepest_and_the_largest_that_it_promises():
    deepest = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH
    assert loads(deepest) is not None
    assert loads(b"[[],[]," + b"[]," * MAX_DEPTH + b"{}]")[-1] == {}
    assert loads(b"[1e308, 9007199254740993]") == [1e308, 9007199254740993]
    assert not math.isinf(loads(b"1.7976931348623157e308"))
    assert loads(rb'["\ud83d\ude00", "\\ud800"]') == ["😀", r"\ud800"]


def or_refused(raw):
    try:
        return loads(raw)
    except InputError:
        return InputError


@examples(200, derandomize=True)
@given(
    st.binary(max_size=40)
    | st.text('[]{}",:0123456789.eE+-\\undfalsetrN ', max_size=30).map(str.encode)
    | VALUES.map(lambda value: json.dumps(value).encode())
    | st.sampled_from(sorted(TRAPS))
)
def test_a_long_body_is_taken_and_refused_as_a_short_one(raw):
    assert or_refused(raw + b" " * LONG) == or_refused(raw)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"[1e400]", "number 1e400, which is too large"),
        (b"-1e999", "too large"),
        (b'{"c:": [{"a": 1, "a": 2}]}', "key 'a' twice"),
        (b"[" * 1000, "nested more than 128"),
        (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), "nested more than 128"),
        (rb'["\ud800"]', "surrogate"),
        (b'["\xff"]', "not UTF-8"),
        (b"1" * 5000, "too many digits"),
        (b"[1,]", "not JSON: trailing comma at line 1 column 4"),
        (b"[NaN]", "not JSON: expected value"),
    ],
)
def test_a_long_body_is_refused_in_words_of_what_is_wrong(raw, words):
    with pytest.raises(InputError, match=words) as caught:
        loads(raw + b" " * LONG)
    assert "\n" not in str(caught.value)


def test_a_long_body_is_read_once_by_the_faster_reader(monkeypatch):
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("read by the slower one"))
    body = {"tokens": [65] * LONG, "a: b": {"c": ",:"}}
    assert loads(json.dumps(body).encode()) == body


def slowly(raw):
    """Counts of what is outside texts, byte by byte."""
    found, in_text, escaped, depth = Counts(escapes=b"\\" in raw), False, False, 0
    for byte in raw.decode("latin-1"):
        if escaped and byte in '"\\':
            escaped = False
            continue
        escaped = False
        if byte == "\\":
            escaped = True
        elif byte == '"':
            in_text = not in_text
        elif not in_text:
            found.commas += byte == ","
            found.members += byte == ":"
            found.containers += byte in "[{"
            depth += (byte in "[{") - (byte in "]}")
            found.deep = max(found.deep, depth)
    return found


@examples(300, derandomize=True)
@given(st.text('[]{}",:a\\', max_size=60).map(str.encode), st.integers(1, 9))
def test_counts_are_the_same_however_the_body_is_cut_into_pieces(raw, piece):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_counts, "PIECE", piece)
        assert outside_texts(raw) == slowly(raw)


@pytest.mark.parametrize("item", ["5", "[]", r'"\""', '{"a":5}'])
def test_counting_takes_memory_for_a_piece_only(item):
    """Fresh memory for all of a body of 3.6 MB at once, many times over, held up streams for 70 ms."""
    raw = f"[{','.join([item] * 1_200_000)}]".encode()
    tracemalloc.start()
    with pytest.raises(InputError, match="at most"):
        check_counts(raw)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40 * PIECE
