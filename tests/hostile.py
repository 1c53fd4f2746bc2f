"""Foreign data gone wrong, for tests of whatever reads it: sound documents and bytes with something changed."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

VALUES = st.one_of(
    st.sampled_from([
        None, True, False, 0, -1, 1, 2, 65, 2**31, 2**63, 2**64, 10**30, -(2**63), 0.5, 1e308, "", "x",
        "\0", "…", "\ud800", [], {}, [[]], [0] * 65, [1] * 65, [-1], ["x"], [None], {"": None}, "9" * 5000,
    ]),
    st.integers(), st.text(max_size=8), st.lists(st.integers(), max_size=4),
)  # fmt: skip


def indices(document: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where every value of a JSON document is."""
    yield at
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for name, value in items:
        yield from indices(value, (*at, name))


@st.composite
def changed(draw: st.DrawFn, document: Any) -> Any:
    """The document with up to three values replaced, removed, repeated or added."""
    built = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.sampled_from(list(indices(built))))
        how = draw(st.sampled_from(["replace", "replace", "replace", "remove", "repeat", "add"]))
        built = _change(built, at, how, copy.deepcopy(draw(VALUES)))
    return built


def _change(document: Any, at: tuple[Any, ...], how: str, value: Any) -> Any:
    if not at:
        return value if how == "replace" else document
    parent = document
    for name in at[:-1]:
        parent = parent[name]
    if how == "remove":
        del parent[at[-1]]
    elif how == "replace":
        parent[at[-1]] = value
    elif isinstance(parent, list):
        parent.append(parent[at[-1]] if how == "repeat" else value)
    else:
        parent["another"] = parent[at[-1]] if how == "repeat" else value
    return document


def as_json(document: Any) -> bytes:
    """JSON, whatever the document holds."""
    return json.dumps(document).encode("utf-8", "surrogatepass")


def damaged(data: bytes) -> st.SearchStrategy[bytes]:
    """The bytes cut, lengthened, or with some of them changed."""

    @st.composite
    def one(draw: st.DrawFn) -> bytes:
        built = bytearray(data)
        for _ in range(draw(st.integers(1, 4))):
            at = draw(st.integers(0, max(len(built) - 1, 0)))
            how = draw(st.sampled_from(["set", "set", "number", "cut", "add"]))
            if how == "set" and built:
                built[at] = draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF, draw(st.integers(0, 255))]))
            elif how == "number":
                size = draw(st.sampled_from([4, 8]))
                built[at : at + size] = draw(st.integers(0, 256**size - 1)).to_bytes(size, "little")
            elif how == "cut":
                del built[at:]
            else:
                built[at:at] = draw(st.binary(max_size=9))
        return bytes(built)

    return one()
