"""`llmc cache keygen|sign|trust`, and what refuses to run without a signature."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from llmc.artifacts.bundle.manifest import Manifest, read_manifest
from llmc.artifacts.bundle.stored import KIND, checkout, read_bundle
from llmc.artifacts.key import LOCAL, Key, canonical_json
from llmc.artifacts.signing.keyring import Keyring
from llmc.artifacts.signing.keys import read_public
from llmc.artifacts.store.entries import entry_body
from llmc.artifacts.store.store import Store
from tests.artifacts.signing.helpers import secrets_of
from tests.cli.helpers import Llmc
from tests.manifests import write_manifest


@pytest.fixture
def signed(llmc: Llmc, keys: Path, bundle: Path) -> Path:
    assert llmc("cache", "sign", bundle, "--key", "release").code == 0
    return bundle


@pytest.fixture
def store(tmp_path: Path, llmc: Llmc) -> Store:
    return Store(tmp_path / "cache")


def key_id(here: Path, name: str = "release") -> str:
    return read_public(here / f"{name}.pub").id


# Keys


def test_keygen_makes_a_pair_and_says_what_each_is_for(llmc: Llmc, here: Path) -> None:
    ran = llmc("cache", "keygen", "release")
    assert ran.out.splitlines() == [
        f"release: private key {key_id(here)[:16]}, for LLMC_SIGNING_KEY or `llmc cache sign --key`",
        "release.pub: its public part, for `llmc cache trust` on other machines",
    ]
    assert (here / "release").stat().st_mode & 0o777 == 0o600
    assert "never replaced" in llmc("cache", "keygen", "release").failed(2)
    found = llmc("cache", "keygen", "other", "--json").json
    assert found == {"id": key_id(here, "other"), "private": "other", "public": "other.pub"}


def test_a_passphrase_comes_from_the_environment_or_a_terminal(
    llmc: Llmc, here: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "LLMC_SIGNING_PASSPHRASE" in llmc("cache", "keygen", "release", "--passphrase").failed(2)
    monkeypatch.setenv("LLMC_SIGNING_PASSPHRASE", "correct horse")
    assert llmc("cache", "keygen", "release", "--passphrase").code == 0
    assert "ENCRYPTED" in (here / "release").read_text()
    assert llmc("cache", "sign", bundle, "--key", "release").code == 0
    monkeypatch.setenv("LLMC_SIGNING_PASSPHRASE", "battery staple")
    assert "battery" not in llmc("cache", "sign", bundle, "--key", "release").failed(2)
    monkeypatch.delenv("LLMC_SIGNING_PASSPHRASE")
    assert "LLMC_SIGNING_PASSPHRASE" in llmc("cache", "sign", bundle, "--key", "release").failed(2)
    requested: list[str] = []

    def answer(text: str, **how: object) -> str:
        assert how["hide_input"] and how["err"]
        requested.append(text)
        return "correct horse"

    monkeypatch.setattr("typer.prompt", answer)
    monkeypatch.setattr("llmc.cli.cache.signing.is_terminal", lambda: True)
    assert llmc("cache", "sign", bundle, "--key", "release").code == 0
    assert llmc("cache", "keygen", "second", "--passphrase").code == 0
    assert requested == ["Passphrase of release", "Passphrase"]


# Signing


def test_signing_a_bundle_signs_it_in_the_store_too(llmc: Llmc, keys: Path, bundle: Path, store: Store) -> None:
    ran = llmc("cache", "sign", bundle, "--key", "release")
    assert ran.out == f"{bundle}: signed by key {key_id(keys)[:16]}, in the store too\n"
    (entry,) = store.entries(KIND)
    manifest, signature = read_bundle(store, entry)
    assert signature == (bundle / "signature.json").read_bytes()
    assert manifest == read_manifest(bundle)
    out = checkout(store, entry, keys / "out")
    assert (out / "signature.json").read_bytes() == signature


def test_a_second_key_signs_beside_the_first(llmc: Llmc, signed: Path, here: Path, store: Store) -> None:
    llmc("cache", "keygen", "second")
    found = llmc("cache", "sign", signed, "--key", "second", "--json").json
    assert found == {
        "key": key_id(here, "second"),
        "signed": [{"what": str(signed), "kind": "bundle", "digest": read_manifest(signed).digest, "stored": True}],
    }
    (entry,) = store.entries(KIND)
    for data in ((signed / "signature.json").read_bytes(), read_bundle(store, entry)[1] or b""):
        ids = [item["keyid"] for item in json.loads(data)["signatures"]]
        assert ids == [key_id(here), key_id(here, "second")]


def test_signing_a_copied_bundle_leaves_the_store_alone(llmc: Llmc, keys: Path, bundle: Path, tmp_path: Path) -> None:
    found = llmc("cache", "sign", bundle, "--key", "release", "--cache-dir", tmp_path / "empty", "--json").json
    assert found["signed"][0]["stored"] is False
    assert not (tmp_path / "empty").exists()


def test_results_in_the_store_are_signed_by_their_key(
    llmc: Llmc, keys: Path, bundle: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMC_SIGNING_KEY", str(keys / "release"))
    entry, bundled = store.entries("executable")[0], store.entries(KIND)[0]
    found = llmc("cache", "sign", entry.key.short, bundled.key.hex, "--json").json["signed"]
    assert [item["kind"] for item in found] == ["executable", "bundle"]
    after = store.lookup(entry.key, verify=True)
    assert after is not None and after.signature is not None and entry_body(after) == entry_body(entry)
    llmc("cache", "trust", "release.pub")
    ring = Keyring(keys / "trusted")
    signature = canonical_json(after.signature)
    assert ring.require(entry_body(after), signature, native=True, origin="here") == key_id(keys)
    assert read_bundle(store, store.entries(KIND)[0])[1] is not None
    llmc("cache", "keygen", "second")
    llmc("cache", "sign", entry.key.short, "--key", "second")
    twice = store.lookup(entry.key)
    assert twice is not None and len((twice.signature or {})["signatures"]) == 2


def test_what_never_leaves_the_machine_needs_no_signature(llmc: Llmc, keys: Path, store: Store) -> None:
    entry = store.publish(Key(f"{LOCAL}thing", {}), {})
    assert "never leaves this machine" in llmc("cache", "sign", entry.key.short, "--key", "release").failed(2)


def test_what_cannot_be_signed_with(llmc: Llmc, keys: Path, bundle: Path) -> None:
    assert "LLMC_SIGNING_KEY" in llmc("cache", "sign", bundle).failed(2)
    assert "No such file" in llmc("cache", "sign", bundle, "--key", "nothing").failed(2)
    assert "cannot be used" in llmc("cache", "sign", bundle, "--key", "release.pub").failed(2)
    (keys / "release").chmod(0o644)
    assert "chmod 600" in llmc("cache", "sign", bundle, "--key", "release").failed(2)
    assert not (bundle / "signature.json").exists()


def test_what_cannot_be_signed(llmc: Llmc, keys: Path) -> None:
    assert "not a bundle" in llmc("cache", "sign", "./nothing", "--key", "release").failed(5)
    assert "no entry with key" in llmc("cache", "sign", "0000000000", "--key", "release").failed(5)


def test_a_store_that_cannot_be_written_does_not_undo_the_bundles_signature(
    llmc: Llmc, keys: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llmc.artifacts.bundle import stored as bundles
    from llmc.errors import CapacityError

    def full(*_: object) -> None:
        raise CapacityError("store: no space left")

    monkeypatch.setattr(bundles, "publish_bundle", full)
    ran = llmc("cache", "sign", bundle, "--key", "release", "--json")
    assert ran.json["signed"][0]["stored"] is False
    assert "not in the store: store: no space left" in ran.err
    assert (bundle / "signature.json").exists()


def test_no_output_ever_holds_the_private_key(llmc: Llmc, keys: Path, bundle: Path) -> None:
    secrets = secrets_of((keys / "release").read_bytes())
    commands = [
        ("cache", "sign", bundle, "--key", "release", "-v"), ("cache", "trust", "release", "-v"),
        ("cache", "trust", "release.pub", "-vv"), ("cache", "trust", "--list", "--json"),
        ("cache", "verify", bundle, "-v"), ("cache", "sign", "release", "--key", "release", "-v"),
        ("cache", "keygen", "release", "-v"), ("cache", "sign", bundle, "--key", "trusted", "-v"),
    ]  # fmt: skip
    for command in commands:
        ran = llmc(*command)
        assert not any(secret in ran.out + ran.err for secret in secrets), command
    assert not any(
        secret in file.read_text(errors="ignore")
        for folder in (bundle, keys / "trusted") for file in folder.rglob("*") if file.is_file() for secret in secrets
    )  # fmt: skip


# Trust


def test_keys_are_trusted_listed_and_removed(llmc: Llmc, keys: Path) -> None:
    assert llmc("cache", "trust", "--list").out == f"0 trusted keys in {keys / 'trusted'}\n"
    assert llmc("cache", "trust", "release.pub").out == f"release: key {key_id(keys)} is trusted\n"
    again = llmc("cache", "trust", "release.pub", "--name", "other", "--json").json
    file = str(keys / "trusted" / "release.pub")
    assert again == {"name": "release", "id": key_id(keys), "file": file, "new": False}
    assert llmc("cache", "trust", "release.pub").out == f"release: key {key_id(keys)} is trusted already\n"
    assert llmc("cache", "trust", "--list").out.splitlines()[1] == f"release  {key_id(keys)}"
    listed = llmc("cache", "trust", "--list", "--json").json
    trusted = [{"name": "release", "id": key_id(keys), "file": file}]
    assert listed == {"folder": str(keys / "trusted"), "trusted": trusted}
    assert llmc("cache", "trust", "--remove", key_id(keys)[:16], "--json").json == {"removed": [file]}
    assert llmc("cache", "trust", "--list", "--json").json["trusted"] == []
    assert "neither the name nor the id" in llmc("cache", "trust", "--remove", "release").failed(2)


def test_a_private_key_is_never_trusted(llmc: Llmc, keys: Path) -> None:
    assert "a private key; give the public one" in llmc("cache", "trust", "release").failed(2)
    assert not (keys / "trusted").exists()


@pytest.mark.parametrize(
    "arguments",
    [(), ("k.pub", "--list"), ("--list", "--remove", "x"), ("--list", "--name", "x"), ("k.pub", "--remove", "x")],
)
def test_one_thing_at_a_time(llmc: Llmc, keys: Path, arguments: tuple[str, ...]) -> None:
    llmc("cache", "trust", *arguments).failed(2)


# Where signatures are required


def test_an_unsigned_bundle_is_not_opened(
    llmc: Llmc, keys: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMC_REQUIRE_SIGNATURES", "1")
    shutil.rmtree(bundle / "blobs")  # refused before any of them is looked for
    for command in (("generate", bundle, "--prompt", "a"), ("verify", bundle), ("bench", bundle)):
        message = llmc(*command).failed(5)
        assert message.startswith(f"{bundle}: native code is not signed; ") and "`llmc cache sign`" in message


def test_a_signed_bundle_is_opened_once_its_key_is_trusted(
    llmc: Llmc, signed: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMC_REQUIRE_SIGNATURES", "1")
    assert key_id(here)[:16] in llmc("generate", signed, "--prompt", "a").failed(5)
    llmc("cache", "trust", "release.pub")
    assert llmc("generate", signed, "--prompt", "a", "--max-tokens", "2").code == 0
    llmc("cache", "trust", "--remove", "release")
    assert "not trusted" in llmc("generate", signed, "--prompt", "a").failed(5)


def alter(bundle: Path) -> None:
    """What an attacker with an editor does: another manifest, well-formed."""
    members = read_manifest(bundle).to_dict() | {"isa": ["avx999"]}
    write_manifest(bundle, Manifest(members).to_bytes())


def test_a_manifest_that_was_altered_after_signing_is_refused(
    llmc: Llmc, signed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llmc("cache", "trust", "release.pub")
    alter(signed)
    ran = llmc("cache", "verify", signed)
    assert ran.code == 5 and "its signature is not valid" in ran.out + ran.err
    monkeypatch.setenv("LLMC_REQUIRE_SIGNATURES", "1")
    assert "it signs other content than this" in llmc("generate", signed, "--prompt", "a").failed(5)


def test_compiling_needs_no_signature_of_its_own_draft(
    llmc: Llmc, toy: Path, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMC_REQUIRE_SIGNATURES", "1")
    flags = ("--device", "fake", "--max-model-len", 32, "--max-num-seqs", 4, "-o", "new", "-q")
    assert llmc("compile", toy, *flags).code == 0
    assert llmc("cache", "sign", "new", "--key", "release").code == 0
    llmc("cache", "trust", "release.pub")
    assert llmc("verify", "new", "-q").code == 0


def test_verify_says_who_signed(llmc: Llmc, keys: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def status() -> dict[str, object]:
        found: dict[str, object] = llmc("cache", "verify", bundle, "--json").json["signature"]
        return found

    assert status() == {"status": "none", "keys": [], "name": None}
    assert llmc("cache", "verify", bundle).out.endswith("0 damaged; not signed\n")
    llmc("cache", "sign", bundle, "--key", "release")
    assert status() == {"status": "unknown", "keys": [key_id(keys)], "name": None}
    text = f"0 damaged; signed by {key_id(keys)[:16]}, which is not trusted here\n"
    assert llmc("cache", "verify", bundle).out.endswith(text)
    monkeypatch.setenv("LLMC_REQUIRE_SIGNATURES", "1")
    refused = llmc("cache", "verify", bundle, "--json")
    assert refused.code == 5 and len(json.loads(refused.out)["bad"]) == 1
    llmc("cache", "trust", "release.pub", "--name", "us")
    assert status() == {"status": "trusted", "keys": [key_id(keys)], "name": "us"}
    assert llmc("cache", "verify", bundle).out.endswith(f"signed by us ({key_id(keys)[:16]}), which is trusted\n")
    (bundle / "signature.json").write_text("{}")
    ran = llmc("cache", "verify", bundle, "--json")
    assert ran.code == 5 and json.loads(ran.out)["signature"]["status"] == "invalid"


@pytest.mark.parametrize("command", ["keygen", "sign", "trust"])
def test_help_has_an_example(llmc: Llmc, command: str) -> None:
    ran = llmc("cache", command, "--help")
    assert ran.code == 0
    assert "Example:" in ran.out and f"llmc cache {command}" in ran.out and "--json" in ran.out
