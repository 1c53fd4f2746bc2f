"""`llmc cache keygen|trust`: keys to sign with, and whose signatures count here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmc.cli.cache.common import JsonFlag, print_json, print_table
from llmc.cli.options import option
from llmc.cli.output import echo
from llmc.errors import InputError
from llmc.paths import expanded

if TYPE_CHECKING:
    from llmc.artifacts.signing.trusted import TrustedKeys
    from llmc.settings import Settings


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command("keygen")(keygen)
    app.command("trust")(trust)


def keygen(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="File of the private key; PATH.pub will be the public one.")
    ],
    protect: Annotated[
        bool,
        typer.Option("--passphrase", help="Encrypt the private key: LLMC_SIGNING_PASSPHRASE, or asked for here."),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Make an Ed25519 key to sign with. Nothing is ever replaced.

    Keep PATH to yourself (its mode is 0600); give PATH.pub to those who shall trust what you sign.

    \b
    Example:
      llmc cache keygen ~/.ssh/llmc-release
      llmc cache keygen release --passphrase --json
    """
    from llmc.artifacts.signing.keys import public_file, write_pair

    path = expanded(path)
    if not path.name:
        raise InputError(f"{path}: a folder; name the file that the private key goes to")
    key = write_pair(path, _new_passphrase() if protect else None)
    if as_json:
        print_json({"id": key.id, "private": str(path), "public": str(public_file(path))})
        return
    echo(f"{path}: private key {key.short}, for LLMC_SIGNING_KEY or `llmc cache sign --key`")
    echo(f"{public_file(path)}: its public part, for `llmc cache trust` on other machines")


def trust(
    key: Annotated[
        Path | None, typer.Argument(metavar="[KEY.pub]", help="A public key to trust.", show_default=False)
    ] = None,
    name: Annotated[str | None, option("--name", "NAME", "What to call it. Default: the file's name.")] = None,
    list_keys: Annotated[bool, typer.Option("--list", help="List the trusted keys.")] = False,
    remove: Annotated[str | None, option("--remove", "ID|NAME", "Trust this key no more.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Trust what a key has signed: native code of a remote is then taken, others' is refused.

    Trusted keys are files in LLMC_TRUSTED_KEYS, by default in your configuration folder. Compare the id that is
    printed with the one its owner tells you.

    \b
    Example:
      llmc cache trust release.pub --name release
      llmc cache trust --list --json
      llmc cache trust --remove release
    """
    from llmc.artifacts.signing.trusted import TrustedKeys

    if (key is not None) + list_keys + (remove is not None) != 1:
        raise InputError("give a KEY.pub to trust, or --list, or --remove ID|NAME")
    if name is not None and key is None:
        raise InputError("--name goes with a KEY.pub to trust")
    keys = TrustedKeys(_settings().trusted_keys)
    if key is not None:
        _add(keys, expanded(key), name, as_json)
    elif remove is not None:
        _remove(keys, remove, as_json)
    else:
        _list(keys, as_json)


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
        echo(f"{what}: trusted no more; removed {', '.join(files)}")


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
    given = _settings().signing_passphrase
    if given is not None:
        return given
    if not is_terminal():
        raise InputError("--passphrase: set LLMC_SIGNING_PASSPHRASE, or run it on a terminal to be asked")
    return str(typer.prompt("Passphrase", hide_input=True, confirmation_prompt=True, err=True))


def is_terminal() -> bool:
    """Whether a user at a terminal can be asked."""
    import sys

    return sys.stdin.isatty() and sys.stderr.isatty()


def _settings() -> Settings:
    from llmc.settings import Settings

    return Settings.from_environment()
