"""One reader of JSON for all that two readers must not take differently."""

from __future__ import annotations

import pytest

from llmc.strict_json import AmbiguousError, loads, loads_object

AMBIGUOUS = {
    '{"a": 1, "a": 2}': "a member occurs twice in one object",
    '[{"b": {"a": 1, "a": 1}}]': "a member occurs twice in one object",
    "[NaN]": "NaN is not a JSON number",
    "[-Infinity]": "-Infinity is not a JSON number",
    "[1e999]": "1e999 is out of range",
    "[" * 100_000: "nested too deeply",
}


@pytest.mark.parametrize("text", AMBIGUOUS)
def test_what_python_alone_would_take_is_refused(text: str) -> None:
    with pytest.raises(AmbiguousError, match=AMBIGUOUS[text]):
        loads(text)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[]", b"1", b"{} {}", '{"a": 1}'.encode("utf-16")])
def test_what_is_no_object_in_utf_8_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        loads_object(data)


def test_what_json_says_is_what_is_read() -> None:
    assert loads_object(b'{"a": [1, 2.5, "x", null, true], "b": {"a": 1}}') == {
        "a": [1, 2.5, "x", None, True],
        "b": {"a": 1},
    }
