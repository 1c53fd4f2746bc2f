"""What counts as signed: P15, signatures over manifests and entries, and refusal that says why."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.artifacts.bundle.trust import Trust, UntrustedError, code_of_entry
from llmc.artifacts.key import canonical_json
from llmc.artifacts.signing.envelope import make_statement
from llmc.artifacts.signing.keyring import Keyring
from llmc.artifacts.signing.signer import Signer
from llmc.artifacts.store.entries import decode_entry, encode_entry, entry_body
from llmc.artifacts.store.store import Store
from llmc.errors import DeviceError
from llmc.platforms import install_line
from llmc.settings import Settings
from tests.artifacts.helpers import key
from tests.artifacts.signing.helpers import CONTENT, OTHER, edited, keyring, signed_by, signer
from tests.tiers import examples

ORIGIN = "file:/remote: bundle 3fa9c2"


def refused(ring: Trust, content: bytes, signature: bytes | None, *, native: bool = True) -> str:
    with pytest.raises(UntrustedError) as caught:
        ring.require(content, signature, native=native, origin=ORIGIN)
    message = str(caught.value)
    assert caught.value.exit_code == 5
    assert message.startswith(f"{ORIGIN}: ") and "\n" not in message
    return message


def taken(ring: Trust, content: bytes, signature: bytes | None, *, native: bool = True) -> str | None:
    return ring.require(content, signature, native=native, origin=ORIGIN)


# What is taken


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("how", [{}, {"allow_unsigned": True}, {"require_signatures": True}])
def test_what_a_trusted_key_signed_is_taken(tmp_path: Path, one: Signer, native: bool, how: dict[str, bool]) -> None:
    ring = keyring(tmp_path / "trusted", one, **how)
    assert taken(ring, CONTENT, one.sign(CONTENT), native=native) == one.public.id


def test_one_trusted_key_among_the_signatures_is_enough(tmp_path: Path, one: Signer, two: Signer) -> None:
    both = two.sign(CONTENT, one.sign(CONTENT))
    assert [item["keyid"] for item in json.loads(both)["signatures"]] == [one.public.id, two.public.id]
    for trusted in (one, two):
        assert taken(keyring(tmp_path / trusted.public.short, trusted), CONTENT, both) == trusted.public.id


def test_unsigned_portable_content_is_taken(tmp_path: Path, one: Signer, two: Signer) -> None:
    ring = keyring(tmp_path / "trusted", one)
    assert taken(ring, CONTENT, None, native=False) is None
    assert taken(ring, CONTENT, two.sign(CONTENT), native=False) is None


def test_unsigned_native_code_is_taken_when_that_is_allowed(tmp_path: Path, one: Signer, two: Signer) -> None:
    ring = keyring(tmp_path / "trusted", one, allow_unsigned=True)
    assert taken(ring, CONTENT, None) is None
    assert taken(ring, CONTENT, two.sign(CONTENT)) is None


# What is refused


def test_unsigned_native_code_is_refused_and_the_ways_out_are_said(tmp_path: Path, one: Signer) -> None:
    for ring in (keyring(tmp_path / "trusted", one), Keyring(tmp_path / "no such folder")):
        message = refused(ring, CONTENT, None)
        assert "native code is not signed" in message
        for way in ("`llmc cache sign`", "`llmc cache trust KEY.pub`", "--allow-unsigned", "LLMC_ALLOW_UNSIGNED=1"):
            assert way in message


def test_native_code_by_an_unknown_key_is_refused_and_the_key_named(tmp_path: Path, one: Signer, two: Signer) -> None:
    message = refused(keyring(tmp_path / "trusted", one), CONTENT, two.sign(CONTENT))
    assert f"signed by {two.public.short}, which is not trusted here" in message
    assert "`llmc cache trust KEY.pub`" in message and "--allow-unsigned" in message


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("allow", [True, False])
def test_where_signatures_are_required_nothing_goes_without(
    tmp_path: Path, one: Signer, two: Signer, native: bool, allow: bool
) -> None:
    ring = keyring(tmp_path / "trusted", one, require_signatures=True, allow_unsigned=allow)
    for signature in (None, two.sign(CONTENT)):
        message = refused(ring, CONTENT, signature, native=native)
        assert "LLMC_REQUIRE_SIGNATURES" in message and "LLMC_ALLOW_UNSIGNED" not in message


def test_the_settings_decide(tmp_path: Path, one: Signer) -> None:
    folder = tmp_path / "trusted"
    keyring(folder, one)
    base = {"LLMC_TRUSTED_KEYS": str(folder)}

    def ring(allow: bool = False, **environ: str) -> Keyring:
        return Keyring.from_settings(Settings.from_environment(base | environ), allow)

    assert taken(ring(), CONTENT, one.sign(CONTENT)) == one.public.id
    refused(ring(), CONTENT, None)
    assert taken(ring(allow=True), CONTENT, None) is None
    assert taken(ring(LLMC_ALLOW_UNSIGNED="1"), CONTENT, None) is None
    refused(ring(LLMC_REQUIRE_SIGNATURES="1"), CONTENT, None, native=False)
    refused(ring(allow=True, LLMC_REQUIRE_SIGNATURES="1"), CONTENT, None)


# What is never taken, whatever is allowed


def attacks(one: Signer, two: Signer) -> dict[str, tuple[bytes, bytes]]:
    good = one.sign(CONTENT)
    (mine,) = json.loads(good)["signatures"]
    (theirs,) = json.loads(two.sign(CONTENT))["signatures"]
    evil = make_statement(OTHER)
    torn = bytearray(base64.b64decode(mine["sig"]))
    torn[0] ^= 1
    flipped = mine | {"sig": base64.b64encode(bytes(torn)).decode()}
    return {
        "altered content": (CONTENT.replace(b'"avx2"', b'"avx3"'), good),
        "content cut short": (CONTENT[:-1], good),
        "another's signature file": (CONTENT, one.sign(OTHER)),
        "payload swapped": (OTHER, edited(good, payload=base64.b64encode(evil).decode())),
        "payload swapped, content kept": (CONTENT, edited(good, payload=base64.b64encode(evil).decode())),
        "signature flipped": (CONTENT, edited(good, signatures=[flipped])),
        "trusted id on another key's signature": (
            CONTENT,
            edited(good, signatures=[theirs | {"keyid": mine["keyid"]}]),
        ),
        "unknown signature beside a false one": (CONTENT, edited(good, signatures=[theirs, flipped])),
        "signature over the payload alone": (
            CONTENT,
            edited(good, signatures=[mine | {"sig": base64.b64encode(one._sign(make_statement(CONTENT))).decode()}]),
        ),
        "payload of another type": (CONTENT, signed_by(one, make_statement(CONTENT), "application/octet-stream")),
        "type changed afterwards": (CONTENT, edited(good, payloadType="application/octet-stream")),
        "the content itself as payload": (CONTENT, signed_by(one, CONTENT)),
        "another sort of statement": (
            CONTENT,
            signed_by(one, make_statement(CONTENT).replace(b"https://slsa.dev/provenance/v1", b"https://scan/failed")),
        ),
        "signature of 32 bytes": (CONTENT, edited(good, signatures=[mine | {"sig": "AA=="}])),
        "an RSA signature": (CONTENT, edited(good, signatures=[mine | {"sig": base64.b64encode(bytes(256)).decode()}])),
        "no signatures": (CONTENT, edited(good, signatures=[])),
        "cut short": (CONTENT, good[: len(good) // 2]),
        "empty": (CONTENT, b""),
        "NaN": (CONTENT, good.replace(b'"payload"', b'"x":NaN,"payload"')),
        "two payloads": (CONTENT, good.replace(b'"payload"', b'"payload":"","payload"')),
        "oversized": (CONTENT, good + b" " * (1 << 20)),
    }


ATTACKS = (
    "altered content", "content cut short", "another's signature file", "payload swapped",
    "payload swapped, content kept", "signature flipped", "trusted id on another key's signature",
    "unknown signature beside a false one", "signature over the payload alone", "payload of another type",
    "type changed afterwards", "the content itself as payload", "another sort of statement", "signature of 32 bytes",
    "an RSA signature", "no signatures", "cut short", "empty", "NaN", "two payloads", "oversized",
)  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("native", [True, False])
def test_a_signature_that_is_there_and_not_valid_is_always_refused(
    tmp_path: Path, one: Signer, two: Signer, attack: str, native: bool
) -> None:
    content, signature = attacks(one, two)[attack]
    ring = keyring(tmp_path / "trusted", one, allow_unsigned=True)
    assert taken(ring, CONTENT, one.sign(CONTENT)), "the key is trusted"
    assert "its signature is not valid: " in refused(ring, content, signature, native=native)


def test_the_list_of_attacks_is_whole(one: Signer, two: Signer) -> None:
    assert set(attacks(one, two)) == set(ATTACKS)


def test_a_false_signature_does_not_spoil_a_true_one(tmp_path: Path, one: Signer, two: Signer) -> None:
    both = json.loads(two.sign(CONTENT, one.sign(CONTENT)))
    both["signatures"][0]["sig"] = base64.b64encode(bytes(64)).decode()
    ring = keyring(tmp_path / "trusted", one, two)
    assert taken(ring, CONTENT, canonical_json(both)) == two.public.id


@pytest.mark.parametrize("claimed", ["0" * 64, "", "not hex", None, 5])
def test_the_key_id_in_a_signature_is_a_hint_that_is_not_believed(
    tmp_path: Path, one: Signer, two: Signer, claimed: object
) -> None:
    (mine,) = json.loads(one.sign(CONTENT))["signatures"]
    ring = keyring(tmp_path / "trusted", two, one)
    found = taken(ring, CONTENT, edited(one.sign(CONTENT), signatures=[mine | {"keyid": claimed}]))
    assert found == one.public.id, "computed from the key that verified it"


def test_signatures_of_two_bundles_cannot_be_swapped(tmp_path: Path, one: Signer) -> None:
    ring = keyring(tmp_path / "trusted", one, allow_unsigned=True)
    assert "other content" in refused(ring, CONTENT, one.sign(OTHER))
    assert "other content" in refused(ring, OTHER, one.sign(CONTENT))


@examples(200)
@given(st.integers(0, 10_000), st.integers(1, 255), st.booleans())
def test_no_altered_byte_of_content_or_signature_gets_through(at: int, change: int, of_content: bool) -> None:
    ring, good = _fixed()
    data = bytearray(CONTENT if of_content else good)
    data[at % len(data)] ^= change
    content, signature = (bytes(data), good) if of_content else (CONTENT, bytes(data))
    try:
        found = ring.require(content, signature, native=True, origin=ORIGIN)
    except UntrustedError:
        return
    assert not of_content and found is not None, "only what is not signed may differ: a key id, base64's alphabet"


@examples(100)
@given(st.binary(max_size=200))
def test_any_signature_file_is_refused_by_one_error_only(signature: bytes) -> None:
    ring, _ = _fixed()
    refused(ring, CONTENT, signature)


_built: list[tuple[Keyring, bytes]] = []


def _fixed() -> tuple[Keyring, bytes]:
    """A keyring and a signature that all examples of a property share."""
    import atexit
    import tempfile

    if not _built:
        folder = tempfile.TemporaryDirectory()
        atexit.register(folder.cleanup)
        one = signer(Path(folder.name), 1)
        _built.append((keyring(Path(folder.name) / "trusted", one), one.sign(CONTENT)))
    return _built[0]


# What it costs


def test_cryptography_is_imported_only_when_there_is_a_signature_to_check(tmp_path: Path, one: Signer) -> None:
    keyring(tmp_path / "trusted", one)
    (tmp_path / "signature").write_bytes(one.sign(CONTENT))
    (tmp_path / "content").write_bytes(CONTENT)
    script = """
import sys
from pathlib import Path
from llmc.artifacts.signing.keyring import Keyring
from llmc.artifacts.signing.signer import Signer
folder = Path(sys.argv[1])
ring = Keyring(folder / "trusted")
content = (folder / "content").read_bytes()
ring.require(content, None, native=False, origin="")
assert "cryptography" not in sys.modules
ring.require(content, (folder / "signature").read_bytes(), native=True, origin="")
assert "cryptography" in sys.modules
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)


def test_a_signature_that_cannot_be_checked_is_never_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one: Signer
) -> None:
    ring = keyring(tmp_path / "trusted", one, allow_unsigned=True)
    signature = one.sign(CONTENT)
    for name in [name for name in sys.modules if name.partition(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(DeviceError, match=rf"{re.escape(install_line('sign'))}"):
        taken(ring, CONTENT, signature, native=False)
    assert taken(ring, CONTENT, None) is None


# End to end


def fetch(far: dict[str, bytes], name: str, ring: Trust, near: Store) -> bool:
    """What a border of the store does: believe nothing, ask the keyring, and only then let an entry in."""
    entry = decode_entry(far[name])
    signature = None if entry.signature is None else canonical_json(entry.signature)
    native = code_of_entry(entry.key, entry.meta) is not None
    ring.require(entry_body(entry), signature, native=native, origin=f"far: {entry.key.kind}")
    near.publish(entry.key, {}, entry.meta)
    return True


def test_native_code_from_afar_comes_in_signed_by_a_trusted_key_or_not_at_all(
    tmp_path: Path, one: Signer, two: Signer
) -> None:
    far_store, near = Store(tmp_path / "far"), Store(tmp_path / "near")
    native = far_store.publish(key(state="native"), {}, {"seconds": 1.0})
    portable = far_store.publish(key(state="portable", target="fake"), {})

    def signed(by: Signer) -> bytes:
        return encode_entry(native._replace(signature=json.loads(by.sign(entry_body(native)))))

    far = {
        "plain": encode_entry(native), "portable": encode_entry(portable), "ours": signed(one), "theirs": signed(two),
        "forged": encode_entry(
            native._replace(meta={"seconds": 2.0}, signature=json.loads(one.sign(entry_body(native))))
        ),
    }  # fmt: skip
    ring = keyring(tmp_path / "trusted", one)
    for name, words in (("plain", "not signed"), ("theirs", two.public.short), ("forged", "other content")):
        with pytest.raises(UntrustedError, match=words):
            fetch(far, name, ring, near)
    assert near.lookup(native.key) is None
    assert fetch(far, "portable", ring, near)
    assert fetch(far, "ours", ring, near)
    assert near.lookup(native.key) is not None
    assert fetch(far, "plain", keyring(tmp_path / "trusted", allow_unsigned=True), near)
    with pytest.raises(UntrustedError, match="other content"):
        fetch(far, "forged", keyring(tmp_path / "trusted", allow_unsigned=True), near)
