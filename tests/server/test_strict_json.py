"""Bodies that are JSON, and all the ways in which they may not be."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.errors import InputError
from llmc.server.protocol.strict_json import MAX_DEPTH, loads

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


@settings(max_examples=60, deadline=None, derandomize=True)
@given(VALUES, st.booleans())
def test_reads_whatever_json_writes(value, ascii_only):
    assert loads(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@settings(max_examples=300, deadline=None, derandomize=True)
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
