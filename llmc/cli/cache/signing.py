"""`llmc cache sign|keygen|trust`: signatures of bundles and stored results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from llmc.cli.cache.common import is_bundle, open_cache, print_json
from llmc.cli.options import Command, argument, flag, store_flag, switch
from llmc.cli.output import echo, print_table
from llmc.errors import InputError
from llmc.paths import expanded
from llmc.settings import Settings

if TYPE_CHECKING:
    from llmc.artifacts.signing.keyring import TrustedKeys
    from llmc.artifacts.signing.signer import Signer


@dataclass(frozen=True, kw_only=True)
class CacheSignCommand(Command):
    """Sign bundles or stored results with your private key. Signatures by other keys stay.

    A bundle's signature covers its manifest and, through the digests in it, every file. It is the file signature.json
    in the bundle folder and travels with the bundle.

    \b
    Example:
      llmc cache sign ./smollm2-cpu --key release
      LLMC_SIGNING_KEY=release llmc cache sign 3fa9c2 77b01e --json
    """

    what: list[str] = argument("BUNDLE|KEY…", "Bundle folders, or keys in the store or their first digits.")
    private: Path | None = flag(None, "PRIVATE", "Private key file. Default: LLMC_SIGNING_KEY.", names="--key")
    cache_dir: Path | None = store_flag()
    as_json: bool = switch("--json", "Print JSON.")

    def run(self) -> None:
        from llmc.api.signing import sign_bundle, sign_entry

        signer = signer_of(self.private)
        store = open_cache(self.cache_dir)
        signed = [(sign_bundle if is_bundle(item) else sign_entry)(signer, store, item) for item in self.what]
        for one in signed:
            if one.not_stored:
                echo(f"llmc: signed in {one.what} only, not in the store: {one.not_stored}", err=True)
        if self.as_json:
            found = [{"what": o.what, "kind": o.kind, "digest": o.digest, "stored": o.stored} for o in signed]
            print_json({"key": signer.public.id, "signed": found})
            return
        for one in signed:
            echo(f"{one.what}: signed by key {signer.public.short}" + (", in the store too" if one.stored else ""))


def signer_of(private: Path | None) -> Signer:
    """Load the private key, by default LLMC_SIGNING_KEY. On a terminal, asks for a missing passphrase."""
    from llmc.artifacts.signing.keys import is_encrypted, read_private
    from llmc.artifacts.signing.signer import Signer

    settings = Settings.from_environment()
    given = private or settings.signing_key
    if given is None:
        raise InputError("name the private key with --key or LLMC_SIGNING_KEY; `llmc cache keygen` creates one")
    path = expanded(given)
    passphrase = settings.signing_passphrase
    if passphrase is None and is_terminal() and is_encrypted(read_private(path)):
        passphrase = str(typer.prompt(f"Passphrase of {path}", hide_input=True, err=True))
    return Signer.load(path, passphrase)


def signature_text(found: dict[str, Any]) -> str:
    """Describe the result of `signature_status` in words."""
    from llmc.artifacts.signing.keys import short_id

    keys = ", ".join(short_id(key) or "an unnamed key" for key in found["keys"])
    return {
        "trusted": f"signed by {found['name']} ({keys}), which is trusted",
        "unknown": f"signed by {keys}, which is not trusted here",
        "invalid": "its signature is not valid",
        "none": "not signed",
    }[found["status"]]


@dataclass(frozen=True, kw_only=True)
class CacheKeygenCommand(Command):
    """Create an Ed25519 key pair for signing. Existing files are never replaced.

    Keep PATH secret (its mode is 0600). Give PATH.pub to everyone who should trust what you sign.

    \b
    Example:
      llmc cache keygen ~/.ssh/llmc-release
      llmc cache keygen release --passphrase --json
    """

    path: Path = argument("PATH", "File for the private key; the public key goes to PATH.pub.")
    protect: bool = switch(
        "--passphrase", "Encrypt the private key with LLMC_SIGNING_PASSPHRASE, or ask for a passphrase."
    )
    as_json: bool = switch("--json", "Print JSON.")

    def run(self) -> None:
        from llmc.artifacts.signing.keys import public_file, write_pair

        path = expanded(self.path)
        if not path.name:
            raise InputError(f"{path}: a folder; name the file for the private key")
        key = write_pair(path, _new_passphrase() if self.protect else None)
        if self.as_json:
            print_json({"id": key.id, "private": str(path), "public": str(public_file(path))})
            return
        echo(f"{path}: private key {key.short}, for LLMC_SIGNING_KEY or `llmc cache sign --key`")
        echo(f"{public_file(path)}: its public part, for `llmc cache trust` on other machines")


@dataclass(frozen=True, kw_only=True)
class CacheTrustCommand(Command):
    """Trust a public key: native code that it signed is accepted from remotes. Other native code is refused.

    Trusted keys are files in LLMC_TRUSTED_KEYS, by default in your configuration folder. Compare the printed id with
    the one that the key's owner gives you.

    \b
    Example:
      llmc cache trust release.pub --name release
      llmc cache trust --list --json
      llmc cache trust --remove release
    """

    key: Path | None = argument("[KEY.pub]", "A public key to trust.", default=None)
    name: str | None = flag(None, "NAME", "Name of the key. Default: the file name.")
    list_keys: bool = switch("--list", "List the trusted keys.")
    remove: str | None = flag(None, "ID|NAME", "Stop trusting this key.")
    as_json: bool = switch("--json", "Print JSON.")

    def run(self) -> None:
        from llmc.artifacts.signing.keyring import TrustedKeys

        if (self.key is not None) + self.list_keys + (self.remove is not None) != 1:
            raise InputError("give a KEY.pub to trust, or --list, or --remove ID|NAME")
        if self.name is not None and self.key is None:
            raise InputError("--name needs a KEY.pub to trust")
        keys = TrustedKeys(Settings.from_environment().trusted_keys)
        if self.key is not None:
            _add(keys, expanded(self.key), self.name, self.as_json)
        elif self.remove is not None:
            _remove(keys, self.remove, self.as_json)
        else:
            _list(keys, self.as_json)


def _add(keys: TrustedKeys, path: Path, name: str | None, as_json: bool) -> None:
    known, new = keys.add(path, name)
    if as_json:
        print_json({"name": known.name, "id": known.key.id, "file": str(known.file), "new": new})
    else:
        echo(f"{known.name}: key {known.key.id} is trusted" + ("" if new else " already"))


def _remove(keys: TrustedKeys, what: str, as_json: bool) -> None:
    files = [str(file) for file in keys.remove(what)]
    if as_json:
        print_json({"removed": files})
    else:
        echo(f"{what}: no longer trusted; removed {', '.join(files)}")


def _list(keys: TrustedKeys, as_json: bool) -> None:
    found = keys.all()
    if as_json:
        items = [{"name": item.name, "id": item.key.id, "file": str(item.file)} for item in found]
        print_json({"folder": str(keys.folder), "trusted": items})
        return
    if found:
        print_table(("NAME", "KEY"), [(item.name, item.key.id) for item in found])
    echo(f"{len(found)} trusted keys in {keys.folder}")


def _new_passphrase() -> str:
    given = Settings.from_environment().signing_passphrase
    if given is not None:
        return given
    if not is_terminal():
        raise InputError("--passphrase: set LLMC_SIGNING_PASSPHRASE, or run it on a terminal to be asked")
    return str(typer.prompt("Passphrase", hide_input=True, confirmation_prompt=True, err=True))


def is_terminal() -> bool:
    """Whether a user at a terminal can answer a question."""
    import sys

    return sys.stdin.isatty() and sys.stderr.isatty()
