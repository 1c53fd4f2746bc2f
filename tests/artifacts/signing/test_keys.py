"""Key files: made once, readable by their owner only, never replaced, never shown."""

from __future__ import annotations

import errno
import logging
import os
import pickle
import re
import shutil
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.artifacts.atomic_write import UnwritableError
from llmc.artifacts.bundle.trust import UntrustedError
from llmc.artifacts.signing.keys import (
    MAX_BYTES,
    SPKI_HEAD,
    PublicKey,
    is_encrypted,
    is_signature,
    parse_public,
    read_private,
    read_public,
    write_pair,
)
from llmc.artifacts.signing.signer import Signer
from llmc.errors import CapacityError, DeviceError, InputError
from llmc.platforms import install_line
from llmc.settings import Settings
from tests.artifacts.helpers import Faults, files_below
from tests.artifacts.signing.helpers import CONTENT, OTHER, edited, private_pem, secrets_of, signer
from tests.tiers import examples

RSA = """-----BEGIN PUBLIC KEY-----
MFwwDQYJKoZIhvcNAQEBBQADSwAwSAJBAL1yHqh1WtiEBQIWJCJYjVJw5HrB1Efl
WnbFdyeTo9MnX8dPBOYOKT4JwtTWFRK3u1tFC2LFSYjfRuLAwD+m4l8CAwEAAQ==
-----END PUBLIC KEY-----
"""
X25519 = PublicKey(bytes(32)).pem().replace(b"MCowBQYDK2Vw", b"MCowBQYDK2Vu")
"""A key of the same length, for another use (RFC 8410)."""


def test_a_pair_is_built_with_the_right_modes_and_signs(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        key = write_pair(tmp_path / "release")
    finally:
        os.umask(old)
    assert (tmp_path / "release").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "release.pub").stat().st_mode & 0o777 == 0o644
    assert read_public(tmp_path / "release.pub") == key
    one = Signer.load(tmp_path / "release")
    assert one.public == key
    assert is_signature(key.raw, one._sign(b"message"), b"message")
    assert not is_signature(key.raw, one._sign(b"message"), b"massage")


def test_every_key_is_another(tmp_path: Path) -> None:
    assert write_pair(tmp_path / "a").id != write_pair(tmp_path / "b").id


@pytest.mark.parametrize("taken", ["release", "release.pub"])
def test_no_key_is_ever_replaced(tmp_path: Path, taken: str) -> None:
    (tmp_path / taken).write_text("precious")
    with pytest.raises(InputError, match="never replaced"):
        write_pair(tmp_path / "release")
    assert [path.name for path in files_below(tmp_path)] == [taken]
    assert (tmp_path / taken).read_text() == "precious"


def test_a_key_that_appears_meanwhile_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "release").write_text("precious")
    monkeypatch.setattr(os.path, "lexists", lambda path: False)
    with pytest.raises(InputError, match="never replaced"):
        write_pair(tmp_path / "release")
    assert (tmp_path / "release").read_text() == "precious"


@pytest.mark.parametrize("call", ["write", "fsync", "open"])
@pytest.mark.parametrize("after", [0, 1])
def test_a_full_disk_leaves_neither_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, after: int
) -> None:
    Faults(monkeypatch, tmp_path).inject(call, errno.ENOSPC, after=after)
    with pytest.raises(CapacityError) as caught:
        write_pair(tmp_path / "release")
    monkeypatch.undo()
    assert files_below(tmp_path) == []
    assert "PRIVATE" not in str(caught.value)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UnwritableError, match="choose another location"):
        write_pair(tmp_path / "nowhere" / "release")


def test_a_passphrase_is_needed_and_has_to_be_right(tmp_path: Path) -> None:
    key = write_pair(tmp_path / "release", "correct horse")
    assert is_encrypted(read_private(tmp_path / "release"))
    assert Signer.load(tmp_path / "release", "correct horse").public == key
    for wrong, words in ((None, "LLMC_SIGNING_PASSPHRASE"), ("", "LLMC_SIGNING_PASSPHRASE"), ("battery", "is wrong")):
        with pytest.raises(InputError, match=words) as caught:
            Signer.load(tmp_path / "release", wrong)
        assert "battery" not in str(caught.value)
    with pytest.raises(InputError, match="empty"):
        write_pair(tmp_path / "other", "")
    write_pair(tmp_path / "plain")
    Signer.load(tmp_path / "plain", "not needed")


def test_the_settings_name_the_key_and_its_passphrase(tmp_path: Path) -> None:
    key = write_pair(tmp_path / "release", "correct horse")
    environ = {"LLMC_SIGNING_KEY": str(tmp_path / "release"), "LLMC_SIGNING_PASSPHRASE": "correct horse"}
    settings = Settings.from_environment(environ)
    found = Signer.from_settings(settings)
    assert found is not None and found.public == key
    assert "correct horse" not in repr(settings)
    assert Signer.from_settings(Settings()) is None


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660, 0o610])
def test_a_private_key_that_others_can_read_is_refused_as_ssh_does(tmp_path: Path, mode: int) -> None:
    signer(tmp_path, 1)
    (tmp_path / "key1").chmod(mode)
    with pytest.raises(InputError, match="chmod 600"):
        Signer.load(tmp_path / "key1")


def test_a_private_key_of_another_user_may_be_readable_by_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signer(tmp_path, 1)
    (tmp_path / "key1").chmod(0o640)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    Signer.load(tmp_path / "key1")


def test_what_is_no_private_key(tmp_path: Path) -> None:
    path = tmp_path / "key"
    for data in (b"", b"x" * 100, private_pem(1)[:-30], RSA.encode(), b"x" * (MAX_BYTES + 1)):
        path.write_bytes(data)
        path.chmod(0o600)
        with pytest.raises(InputError, match=f"^{path}: the private key cannot be used"):
            Signer.load(path)
    with pytest.raises(InputError, match="No such file"):
        Signer.load(tmp_path / "nothing")
    with pytest.raises(InputError, match="cannot be used"):
        Signer.load(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(InputError, match="not a regular file"):
        Signer.load(tmp_path / "pipe")


def test_a_private_key_of_another_algorithm_is_refused(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    pem = generate_private_key(SECP256R1()).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (tmp_path / "key").write_bytes(pem)
    (tmp_path / "key").chmod(0o600)
    with pytest.raises(InputError, match="another algorithm than Ed25519"):
        Signer.load(tmp_path / "key")


def test_the_public_part_of_a_key_is_written_as_rfc_8410_says() -> None:
    raw = bytes.fromhex("19bf44096984cdfe8541bac167dc3b96c85086aa30b6b6cb0c5c38ad703166e1")
    text = b"MCowBQYDK2VwAyEAGb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE="
    pem = b"-----BEGIN PUBLIC KEY-----\n" + text + b"\n-----END PUBLIC KEY-----\n"
    assert PublicKey(raw).pem() == pem
    assert parse_public(pem) == PublicKey(raw)
    assert parse_public(pem.replace(b"\n", b"\r\n")) == PublicKey(raw)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (RSA.encode(), "another algorithm than Ed25519"),
        (X25519, "another algorithm than Ed25519"),
        (b"", "not one public key"),
        (b"hello", "not one public key"),
        (PublicKey(bytes(32)).pem() * 2, "not one public key"),
        (PublicKey(bytes(31)).pem(), "another algorithm"),
        (PublicKey(bytes(33)).pem(), "another algorithm"),
        (PublicKey(bytes(32)).pem().replace(b"A", b"!", 1), "not one public key"),
        (PublicKey(bytes(32)).pem().replace(b"A=", b"A"), "not one public key"),
        (private_pem(1), "a private key; give the public one"),
        (PublicKey(bytes(32)).pem() + private_pem(1), "a private key; give the public one"),
    ],
)
def test_what_is_no_ed25519_public_key(data: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_public(data)


@examples(100)
@given(st.binary(max_size=80) | st.binary(max_size=60).map(lambda data: PublicKey(data).pem()))
def test_any_bytes_are_a_public_key_or_a_value_error(data: bytes) -> None:
    try:
        found = parse_public(data)
    except ValueError:
        return
    assert found.pem() == data and len(found.raw) == 32


def test_the_id_is_the_digest_of_the_subject_public_key_info() -> None:
    import hashlib

    assert PublicKey(bytes(32)).id == hashlib.sha256(SPKI_HEAD + bytes(32)).hexdigest()
    assert PublicKey(bytes(32)).short == PublicKey(bytes(32)).id[:16]


@pytest.mark.full
def test_openssl_keys_can_be_used(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl: apt-get install openssl")
    make = ["openssl", "genpkey", "-algorithm", "ed25519", "-out", tmp_path / "key"]
    subprocess.run(make, check=True, capture_output=True)
    subprocess.run(
        ["openssl", "pkey", "-in", tmp_path / "key", "-pubout", "-out", tmp_path / "key.pub"],
        check=True,
        capture_output=True,
    )
    (tmp_path / "key").chmod(0o600)
    assert Signer.load(tmp_path / "key").public == read_public(tmp_path / "key.pub")


# Signing


def test_the_same_content_and_key_give_the_same_signature(tmp_path: Path) -> None:
    one = signer(tmp_path, 1)
    assert one.sign(CONTENT) == one.sign(CONTENT) == one.sign(CONTENT, one.sign(CONTENT))
    assert one.sign(CONTENT) != one.sign(OTHER)


def test_an_existing_signature_of_other_content_is_not_carried_on(tmp_path: Path) -> None:
    one, two = signer(tmp_path, 1), signer(tmp_path, 2)
    for existing in (two.sign(OTHER), b"", b"{}", edited(two.sign(CONTENT), payload="e30=")):
        with pytest.raises(UntrustedError, match="remove it, and sign again"):
            one.sign(CONTENT, existing)


def test_what_is_no_manifest_or_entry_is_not_signed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="neither a manifest, nor an entry, nor a certificate"):
        signer(tmp_path, 1).sign(b"{}")
    huge = b'{"kind":"llmc-bundle","provenance":{"buildDefinition":{"x":"%s"},"runDetails":{}}}' % (b"x" * (1 << 20))
    with pytest.raises(InputError, match="the limit of 1048576"):
        signer(tmp_path, 1).sign(huge)


# Secrecy


def test_a_private_key_is_in_no_message_log_repr_pickle_or_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    one = signer(tmp_path, 1)
    pem = private_pem(1)
    seen = [repr(one), str(one), repr(one.public), one.sign(CONTENT).decode()]
    (tmp_path / "torn").write_bytes(pem[:-40])
    (tmp_path / "open").write_bytes(pem)
    (tmp_path / "torn").chmod(0o600)
    (tmp_path / "open").chmod(0o644)
    calls = [
        lambda: Signer.load(tmp_path / "torn"), lambda: Signer.load(tmp_path / "open"),
        lambda: read_public(tmp_path / "key1"), lambda: parse_public(pem), lambda: pickle.dumps(one),
        lambda: one.sign(b"{}"),
    ]  # fmt: skip
    for call in calls:
        try:
            call()
        except (InputError, ValueError, TypeError) as error:
            seen += traceback.format_exception(error)
        else:
            pytest.fail("it should have failed")
    text = "".join([*seen, caplog.text, *capfd.readouterr()])
    for secret in secrets_of(pem):
        assert secret not in text


def test_without_cryptography_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = signer(tmp_path, 1)
    for name in [name for name in sys.modules if name.partition(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    calls = [lambda: Signer.load(tmp_path / "key1"), lambda: write_pair(tmp_path / "new"),
             lambda: is_signature(one.public.raw, bytes(64), b"")]  # fmt: skip
    for call in calls:
        with pytest.raises(DeviceError, match=rf"{re.escape(install_line('sign'))}"):
            call()
    assert not (tmp_path / "new").exists()
