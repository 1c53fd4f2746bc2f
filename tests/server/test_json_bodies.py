"""Bodies that are JSON, and all the ways in which they may not be."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.errors import InputError
from llmc.server.routes.common import read_json
from tests.server.conftest import Api
from tests.tiers import examples

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)

NOT_JSON = {
    b'{"a": NaN}': "line 1 column 7",
    b"[Infinity]": "line 1 column 2",
    b"[-Infinity]": "line 1 column",
    b"1" * 5000: "number out of range",
    b"[" * 100_000: "recursion limit exceeded",
    b'{"a":' * 100_000: "recursion limit exceeded",
    rb'["\ud800"]': "hex escape",
    rb'{"\udfff": 1}': "surrogate",
    rb'["\ud83d\u0041"]': "surrogate",
    b'["\xff"]': "unicode",
    b'["\xed\xa0\x80"]': "unicode",
    '["a"]'.encode("utf-16"): "line 1",
    b"\xef\xbb\xbf[]": "line 1",
    b"": "EOF",
    b"[1,]": "trailing comma",
    b"{'a': 1}": "line 1",
    b'["\n"]': "control character",
    b"[] []": "trailing characters",
    b"[01]": "line 1",
}


@pytest.mark.parametrize("raw", NOT_JSON, ids=[f"{raw[:24]!r}" for raw in NOT_JSON])
def test_what_is_not_json_is_refused_in_one_line(raw: bytes) -> None:
    with pytest.raises(InputError, match=NOT_JSON[raw]) as caught:
        read_json(raw)
    assert "\n" not in str(caught.value)


@examples(60, derandomize=True)
@given(VALUES, st.booleans())
def test_whatever_json_writes_is_read(value: object, ascii_only: bool) -> None:
    assert read_json(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@examples(300, derandomize=True)
@given(st.binary(max_size=40) | st.text('[]{}",:0123456789.eE+-\\undfalsetrN ', max_size=30).map(str.encode))
def test_any_bytes_are_a_value_or_an_input_error(raw: bytes) -> None:
    try:
        value = read_json(raw)
    except InputError:
        return
    json.dumps(value, ensure_ascii=False).encode()


@pytest.mark.parametrize("field", ["temperature", "top_p"])
def test_a_number_too_large_is_no_number(api: Api, field: str) -> None:
    answer = api.raw("/v1/completions", b'{"prompt": "a", "%s": 1e400}' % field.encode())
    assert answer.status_code == 400 and answer.json()["error"]["param"] == field
