"""The folder of trusted keys: what is in it is trusted, what was removed is not, what anybody can write is refused."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from llmc.artifacts.bundle.trust import UntrustedError
from llmc.artifacts.signing.keyring import Keyring, TrustedKeys
from llmc.artifacts.signing.keys import PublicKey
from llmc.artifacts.signing.signer import Signer
from llmc.errors import CapacityError, InputError
from tests.artifacts.helpers import Faults, files_below
from tests.artifacts.signing.helpers import CONTENT, keyring, private_pem, secrets_of
from tests.artifacts.signing.test_keyring import refused, taken
from tests.artifacts.signing.test_keys import RSA


def test_a_key_that_was_removed_is_not_trusted_from_then_on(tmp_path: Path, one: Signer) -> None:
    ring = keyring(tmp_path / "trusted", one)
    assert taken(ring, CONTENT, one.sign(CONTENT))
    TrustedKeys(tmp_path / "trusted").remove(one.public.short)
    assert "not trusted here" in refused(ring, CONTENT, one.sign(CONTENT))


def test_removing_a_key_removes_every_name_of_it(tmp_path: Path, one: Signer, two: Signer) -> None:
    keyring(tmp_path / "trusted", one, two)
    (tmp_path / "trusted" / "alias.pub").write_bytes(one.public.pem())
    assert len(TrustedKeys(tmp_path / "trusted").remove("alias")) == 2
    assert [item.key for item in TrustedKeys(tmp_path / "trusted").all()] == [two.public]


def test_adding_copies_the_public_key_under_a_name(tmp_path: Path, one: Signer, two: Signer) -> None:
    keys = TrustedKeys(tmp_path / "config" / "trusted")
    assert keys.all() == []
    known, new = keys.add(tmp_path / "key1.pub")
    assert (known.name, new, known.file.stat().st_mode & 0o777) == ("key1", True, 0o644)
    assert known.file.read_bytes() == one.public.pem()
    assert keys.add(tmp_path / "key1.pub", "again") == (known, False)
    with pytest.raises(InputError, match="another key is trusted under the name key1"):
        keys.add(tmp_path / "key2.pub", "key1")
    for name in ("../up", "", ".hidden", "a/b", "x" * 65, "a b", "/abs"):
        if name:
            with pytest.raises(InputError, match="cannot be the name of a key"):
                keys.add(tmp_path / "key2.pub", name)
    assert [item.name for item in keys.all()] == ["key1"]


def test_a_private_key_given_by_mistake_is_refused_and_not_copied(tmp_path: Path, one: Signer) -> None:
    keys = TrustedKeys(tmp_path / "trusted")
    with pytest.raises(InputError, match="a private key; give the public one") as caught:
        keys.add(tmp_path / "key1")
    assert not (tmp_path / "trusted").exists()
    assert not any(secret in str(caught.value) for secret in secrets_of(private_pem(1)))


def test_an_rsa_key_is_refused_and_the_reason_said(tmp_path: Path) -> None:
    (tmp_path / "rsa.pub").write_text(RSA)
    with pytest.raises(InputError, match="another algorithm than Ed25519"):
        TrustedKeys(tmp_path / "trusted").add(tmp_path / "rsa.pub")
    with pytest.raises(UntrustedError, match=r"rsa\.pub: not a key that can be trusted: .*another algorithm"):
        TrustedKeys(tmp_path).all()


def test_a_folder_that_cannot_be_read_trusts_nobody(tmp_path: Path, one: Signer) -> None:
    (tmp_path / "file").write_text("not a folder")
    ring = Keyring(tmp_path / "file", allow_unsigned=True)
    with pytest.raises(UntrustedError, match="the trusted keys cannot be read"):
        taken(ring, CONTENT, one.sign(CONTENT))
    with pytest.raises(UntrustedError, match="LLMC_TRUSTED_KEYS"):
        TrustedKeys(tmp_path / "file").all()


@pytest.mark.parametrize("which", ["key", "folder"])
def test_what_every_user_could_have_written_is_not_believed(tmp_path: Path, one: Signer, which: str) -> None:
    ring = keyring(tmp_path / "trusted", one)
    (file,) = files_below(tmp_path / "trusted")
    (file if which == "key" else file.parent).chmod(0o777)
    with pytest.raises(UntrustedError, match=r"can be written by every user \(mode 777\); chmod go-w "):
        taken(ring, CONTENT, one.sign(CONTENT))
    (file if which == "key" else file.parent).chmod(0o755)
    assert taken(ring, CONTENT, one.sign(CONTENT))


def test_a_damaged_key_is_named_and_can_be_removed_by_its_name(tmp_path: Path, one: Signer) -> None:
    keyring(tmp_path / "trusted", one)
    keys = TrustedKeys(tmp_path / "trusted")
    (tmp_path / "trusted" / "torn.pub").write_bytes(one.public.pem()[:40])
    (tmp_path / "trusted" / "README").write_text("passed over")
    with pytest.raises(UntrustedError, match=r"torn\.pub"):
        keys.all()
    assert [file.name for file in keys.remove("torn")] == ["torn.pub"]
    assert [item.key for item in keys.all()] == [one.public]


def test_removing_what_is_not_there_or_not_clear(tmp_path: Path, one: Signer, two: Signer) -> None:
    keyring(tmp_path / "trusted", one, two)
    keys = TrustedKeys(tmp_path / "trusted")
    for what in ("nobody", "0" * 64, one.public.id[:4], "", "../key1"):
        with pytest.raises(InputError, match="neither the name nor the id"):
            keys.remove(what)
    assert len(keys.all()) == 2
    keys.remove(one.public.id[:8].upper())
    assert [item.key for item in keys.all()] == [two.public]


def test_the_beginning_of_two_ids_names_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one: Signer, two: Signer
) -> None:
    keyring(tmp_path / "trusted", one, two)
    monkeypatch.setattr(PublicKey, "id", property(lambda self: "ab" * 16 + self.raw.hex()[:32]))
    with pytest.raises(InputError, match="more than one id"):
        TrustedKeys(tmp_path / "trusted").remove("abababab")


def test_a_full_disk_leaves_the_folder_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one: Signer) -> None:
    folder = tmp_path / "trusted"
    folder.mkdir()
    Faults(monkeypatch, folder).inject("fsync", errno.ENOSPC)
    with pytest.raises(CapacityError):
        TrustedKeys(folder).add(tmp_path / "key1.pub")
    assert files_below(folder) == []
