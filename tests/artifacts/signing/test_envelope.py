"""Signature files: one form, drifting never, and nothing but ValueError for anything else."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.artifacts.bundle.reader import MAX_SIGNATURE_BYTES
from llmc.artifacts.key import Key, canonical_json
from llmc.artifacts.signing.envelope import (
    MAX_SIGNATURES,
    Envelope,
    Signature,
    decode,
    encode,
    make_statement,
    require_about,
)
from llmc.artifacts.store.entries import Entry, entry_body
from tests.artifacts.signing.helpers import CONTENT, OTHER, edited, private_pem, signer, statement
from tests.tiers import examples

GOLDEN_CONTENT = (
    b'{"kind":"llmc-bundle","provenance":{"buildDefinition":{"buildType":"t"},"runDetails":{"builder":{"id":"b"}}}}'
)
GOLDEN = Path(__file__).with_name("golden_envelope.json")


def test_the_golden_envelope_is_still_what_is_built_and_read(tmp_path: Path) -> None:
    built = signer(tmp_path, 1).sign(GOLDEN_CONTENT)
    assert built == GOLDEN.read_bytes(), "the format of signature files drifted: signatures out there would not count"
    require_about(decode(GOLDEN.read_bytes()).payload, GOLDEN_CONTENT)


def test_an_envelope_is_read_as_it_was_written() -> None:
    built = Envelope(b"payload \xff", (Signature("a" * 64, bytes(64)), Signature("", bytes(range(64)))))
    assert decode(encode(built)) == built


def test_what_is_signed_is_the_pre_authentication_encoding_of_the_specification() -> None:
    assert Envelope("é".encode(), ()).signed_bytes == b"DSSEv1 28 application/vnd.in-toto+json 2 \xc3\xa9"


def test_the_payload_is_an_in_toto_statement_about_the_manifest(tmp_path: Path) -> None:
    found = statement(signer(tmp_path, 1).sign(CONTENT))
    assert found["_type"] == "https://in-toto.io/Statement/v1"
    assert found["predicateType"] == "https://slsa.dev/provenance/v1"
    assert found["predicate"] == {
        "buildDefinition": {"buildType": "test"},
        "runDetails": {"builder": {"id": "us"}},
    }
    (subject,) = found["subject"]
    assert subject["name"] == "manifest.json"
    (tmp_path / "manifest.json").write_bytes(CONTENT)
    if shutil.which("sha256sum"):
        out = subprocess.run(["sha256sum", tmp_path / "manifest.json"], capture_output=True, text=True, check=True)
        assert out.stdout.split()[0] == subject["digest"]["sha256"]


@pytest.mark.parametrize("provenance", [None, {}, {"buildDefinition": {}}, {"buildDefinition": 1, "runDetails": {}}])
def test_a_bundle_without_provenance_does_not_claim_any(provenance: object) -> None:
    content = canonical_json({"kind": "llmc-bundle"} | ({} if provenance is None else {"provenance": provenance}))
    found = json.loads(make_statement(content))
    assert (found["predicateType"], found["predicate"]) == ("urn:llmc:content:v1", {"kind": "bundle"})


def test_an_entry_is_signed_by_its_body() -> None:
    body = entry_body(Entry(Key("weights", {"source": "a"}), {}, {}, 1.5, 0.0))
    found = json.loads(make_statement(body))
    assert found["subject"][0]["name"] == "entry"
    assert (found["predicateType"], found["predicate"]) == ("urn:llmc:content:v1", {"kind": "weights"})


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"kind":"x"}', b'{"kind":1,"components":{}}', b"\xff"])
def test_nothing_but_manifests_and_entries_is_stated(content: bytes) -> None:
    with pytest.raises(ValueError):
        make_statement(content)


def test_base64_of_the_other_alphabet_and_unknown_members_are_read_as_the_specification_wants(tmp_path: Path) -> None:
    built = signer(tmp_path, 1).sign(CONTENT)
    document = json.loads(built)
    (one,) = document["signatures"]
    one["sig"] = one["sig"].replace("+", "-").replace("/", "_")
    assert decode(canonical_json(document | {"later": [1], "signatures": [one | {"cert": "x"}]})) == decode(built)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"payloadType": "text/plain"}, "not of type"),
    ({"payloadType": None}, "not of type"),
    ({"payload": 5}, "not base64"),
    ({"payload": "a"}, "not base64"),
    ({"payload": "YQ==\n"}, "not base64"),
    ({"payload": "é"}, "not base64"),
    ({"signatures": []}, "1 to 16"),
    ({"signatures": {}}, "1 to 16"),
    ({"signatures": None}, "1 to 16"),
    ({"signatures": ["x"]}, "not an object"),
    ({"signatures": [{"sig": base64.b64encode(bytes(63)).decode()}]}, "63 bytes"),
    ({"signatures": [{"sig": base64.b64encode(bytes(256)).decode()}]}, "256 bytes"),
    ({"signatures": [{"keyid": "a" * 64}]}, "not base64"),
    ({"signatures": [{"sig": base64.b64encode(bytes(64)).decode()}] * (MAX_SIGNATURES + 1)}, "1 to 16"),
]


@pytest.mark.parametrize(("change", "words"), BAD)
def test_a_file_that_is_no_envelope(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        decode(edited(signer(tmp_path, 1).sign(CONTENT), **change))


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"null", b"[]", b'"x"', b"\xff\xfe{\x00}\x00", b"[" * 100_000, b'{"a":1}{"a":1}',
        b'{"payloadType":NaN}', b'{"payload":Infinity}', b'{"payload":1e999}',
        b'{"payload":"","payload":""}', b"1" * 5000, b" " * (MAX_SIGNATURE_BYTES + 1),
    ],
)  # fmt: skip
def test_a_file_that_is_no_strict_json_object(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode(data)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    built = signer(tmp_path, 1).sign(CONTENT).rstrip()
    for end in range(len(built)):
        with pytest.raises(ValueError):
            decode(built[:end])


def test_what_cannot_be_read_is_not_written() -> None:
    with pytest.raises(ValueError, match="the limit of 1048576"):
        encode(Envelope(b"x" * MAX_SIGNATURE_BYTES, (Signature("", bytes(64)),)))
    with pytest.raises(ValueError, match="already has 16 signatures"):
        encode(Envelope(b"x", (Signature("", bytes(64)),) * (MAX_SIGNATURES + 1)))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
MEMBERS = st.sampled_from(["payload", "payloadType", "signatures", "_type", "subject", "predicateType", "predicate"])


@examples(150)
@given(st.dictionaries(MEMBERS, JSON, max_size=5))
def test_any_json_is_an_envelope_or_a_value_error(members: dict[str, Any]) -> None:
    data = json.dumps(members).encode()
    for read in (decode, lambda found: require_about(found, CONTENT)):
        with pytest.raises(ValueError):
            read(data)


@examples(150)
@given(st.binary(max_size=60))
def test_any_bytes_are_an_envelope_or_a_value_error(data: bytes) -> None:
    for read in (decode, make_statement, lambda found: require_about(found, CONTENT)):
        with pytest.raises(ValueError):
            read(data)


GOOD = json.loads(make_statement(CONTENT))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"_type": "https://in-toto.io/Statement/v0.1"}, "not a statement of type"),
        ({"predicateType": "https://example.com/scan-failed"}, "another type"),
        ({"predicateType": ["https://slsa.dev/provenance/v1"]}, "another type"),
        ({"subject": []}, "about one subject"),
        ({"subject": [GOOD["subject"][0], GOOD["subject"][0]]}, "about one subject"),
        ({"subject": ["manifest.json"]}, "about one subject"),
        ({"subject": [{"name": "manifest.json"}]}, "other content"),
        ({"subject": [{"digest": {"sha512": "a" * 128}}]}, "other content"),
        ({"subject": [{"digest": {"sha256": GOOD["subject"][0]["digest"]["sha256"].upper()}}]}, "other content"),
    ],
)
def test_a_statement_that_does_not_vouch_for_the_content(change: dict[str, Any], words: str) -> None:
    require_about(canonical_json(GOOD), CONTENT)
    with pytest.raises(ValueError, match=words):
        require_about(canonical_json(GOOD | change), CONTENT)


def test_a_statement_about_other_content() -> None:
    with pytest.raises(ValueError, match="other content"):
        require_about(make_statement(OTHER), CONTENT)


@pytest.mark.full
def test_openssl_verifies_what_we_sign(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl: apt-get install openssl")
    one = signer(tmp_path, 1)
    envelope = decode(one.sign(CONTENT))
    (tmp_path / "message").write_bytes(envelope.signed_bytes)
    (tmp_path / "sig").write_bytes(envelope.signatures[0].value)
    verify = [
        "openssl",
        "pkeyutl",
        "-verify",
        "-pubin",
        "-inkey",
        "key1.pub",
        "-rawin",
        "-in",
        "message",
        "-sigfile",
        "sig",
    ]
    assert subprocess.run(verify, cwd=tmp_path, capture_output=True, check=False).returncode == 0
    (tmp_path / "message").write_bytes(envelope.signed_bytes + b" ")
    assert subprocess.run(verify, cwd=tmp_path, capture_output=True, check=False).returncode != 0
    der = subprocess.run(
        ["openssl", "pkey", "-pubin", "-in", "key1.pub", "-outform", "DER"],
        cwd=tmp_path,
        capture_output=True,
        check=True,
    ).stdout
    import hashlib

    assert hashlib.sha256(der).hexdigest() == one.public.id
    assert private_pem(1)  # the key is in the form that openssl reads and writes
