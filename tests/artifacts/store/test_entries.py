"""What a file says of an entry is checked before any of it is used."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from llmc.artifacts.digest import Blob, digest_bytes
from llmc.artifacts.key import canonical_json
from llmc.artifacts.store.entries import MAX_BYTES, Entry, decode_entry, encode_entry
from tests.artifacts.helpers import key

ENTRY = Entry(key(), {"graph": Blob(digest_bytes(b"graph"), 5)}, {"seconds": 1.5}, 1.0, 2.0)


def written(change: Callable[[dict[str, Any]], object]) -> bytes:
    """The entry's file with a change to its document; its digest is that of the changed body."""
    document = json.loads(encode_entry(ENTRY))
    change(document)
    return json.dumps(document | {"digest": digest_bytes(canonical_json(document["entry"]))}).encode()


def test_an_entry_is_read_as_it_was_written() -> None:
    assert decode_entry(encode_entry(ENTRY), used=2.0) == ENTRY
    assert decode_entry(written(lambda document: None), used=2.0) == ENTRY


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(other=1), "unknown member 'other'"),
        (lambda d: d["entry"].update(schema=0), "schema 0, expected"),
        (lambda d: d["entry"]["outputs"]["graph"].update(digest="sha256:0"), "an output is not a blob"),
        (lambda d: d["entry"]["outputs"]["graph"].update(size=-1), "an output is not a blob"),
        (lambda d: d["entry"]["outputs"]["graph"].update(size=True), "an output is not a blob"),
        (lambda d: d.update(signature="signed"), "its signature is not an object"),
        (lambda d: d["entry"].pop("created"), "KeyError: 'created'"),
    ],
)
def test_what_is_not_sound_is_refused(change: Callable[[dict[str, Any]], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode_entry(written(change))


def test_a_body_of_another_digest_and_a_file_beyond_the_limit_are_refused() -> None:
    with pytest.raises(ValueError, match="content was altered"):
        decode_entry(encode_entry(ENTRY).replace(b"1.5", b"2.5"))
    with pytest.raises(ValueError, match=f"larger than {MAX_BYTES} bytes"):
        decode_entry(b" " * (MAX_BYTES + 1))
