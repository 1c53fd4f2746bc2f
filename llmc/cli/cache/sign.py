"""`llmc cache sign`: vouch for a bundle or a stored result; and what is said of a bundle's signature."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmc.cli.cache.common import CacheDirFlag, JsonFlag, is_bundle, open_cache, print_json
from llmc.cli.cache.trust import is_terminal
from llmc.cli.options import option
from llmc.cli.output import echo
from llmc.errors import CapacityError, InputError
from llmc.paths import expanded

if TYPE_CHECKING:
    from llmc.artifacts.bundle.reader import BundleFiles
    from llmc.artifacts.signing.signer import Signer
    from llmc.artifacts.store.store import Store


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("sign")(sign)


def sign(
    what: Annotated[
        list[str],
        typer.Argument(metavar="BUNDLE|KEY…", help="Bundle folders; or keys of the store, or their first digits."),
    ],
    private: Annotated[
        Path | None, option("--key", "PRIVATE", "The private key. Default: LLMC_SIGNING_KEY.", show_default=False)
    ] = None,
    cache_dir: CacheDirFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Sign bundles, or results in the store, with your private key. Other keys' signatures stay.

    A bundle's signature covers its manifest, and by the digests in it every file. It is signature.json in the
    bundle's folder, and goes along with it wherever it is pushed or exported.

    \b
    Example:
      llmc cache sign ./smollm2-cpu --key release
      LLMC_SIGNING_KEY=release llmc cache sign 3fa9c2 77b01e --json
    """
    signer = signer_of(private)
    store = open_cache(cache_dir)
    signed = [
        _sign_bundle(signer, store, item) if is_bundle(item) else _sign_entry(signer, store, item) for item in what
    ]
    if as_json:
        print_json({"key": signer.public.id, "signed": signed})
        return
    for item in signed:
        echo(f"{item['what']}: signed by key {signer.public.short}" + (", in the store too" if item["stored"] else ""))


def signer_of(private: Path | None) -> Signer:
    """The signer of a private key, by default that of LLMC_SIGNING_KEY; a passphrase is asked for on a terminal."""
    from llmc.artifacts.signing.keys import is_encrypted, read_private
    from llmc.artifacts.signing.signer import Signer
    from llmc.settings import Settings

    settings = Settings.from_environment()
    given = private or settings.signing_key
    if given is None:
        raise InputError("name the private key with --key or LLMC_SIGNING_KEY; `llmc cache keygen` makes one")
    path = expanded(given)
    passphrase = settings.signing_passphrase
    if passphrase is None and is_terminal() and is_encrypted(read_private(path)):
        passphrase = str(typer.prompt(f"Passphrase of {path}", hide_input=True, err=True))
    return Signer.load(path, passphrase)


def _sign_bundle(signer: Signer, store: Store, folder: str) -> dict[str, Any]:
    """Sign a bundle folder, and the same bundle in the store if it is there."""
    from llmc.artifacts.atomic_write import UnwritableError
    from llmc.artifacts.bundle.reader import BundleFiles
    from llmc.artifacts.bundle.stored import bundle_key, publish_bundle, read_bundle
    from llmc.artifacts.bundle.writer import write_signature

    files = BundleFiles.open(folder)
    content = files.manifest.to_bytes()
    write_signature(files.folder, signer.sign(content, files.signature))
    entry = store.lookup(bundle_key(files.manifest))
    stored = entry is not None
    if entry is not None:
        manifest, there = read_bundle(store, entry)
        try:
            publish_bundle(store, manifest, signer.sign(content, there))
        except (CapacityError, UnwritableError) as error:
            echo(f"llmc: signed in {folder} only, not in the store: {error}", err=True)
            stored = False
    return {"what": folder, "kind": "bundle", "digest": files.manifest.digest, "stored": stored}


def _sign_entry(signer: Signer, store: Store, prefix: str) -> dict[str, Any]:
    """Sign what is in the store under a key."""
    from llmc.artifacts.bundle.stored import KIND, publish_bundle, read_bundle
    from llmc.artifacts.store.entries import Entries, entry_body

    entry = store.find(prefix)
    if entry.key.is_local:
        raise InputError(f"{entry.key.kind} {entry.key.short} never leaves this machine, so nobody needs it signed")
    if entry.key.kind == KIND:
        manifest, there = read_bundle(store, entry)
        publish_bundle(store, manifest, signer.sign(manifest.to_bytes(), there))
    else:
        signature = json.loads(signer.sign(entry_body(entry), entry.envelope))
        Entries(store.layout).adopt(entry._replace(signature=signature))
    return {
        "what": f"{entry.key.kind} {entry.key.short}",
        "kind": entry.key.kind,
        "digest": entry.key.digest,
        "stored": True,
    }


def signature_status(files: BundleFiles) -> tuple[dict[str, Any], list[str]]:
    """A bundle's signature status, and what is wrong with it, also if it is missing.

    `{"status": "trusted" | "unknown" | "invalid" | "none", "keys": [id, …], "name": name of the trusted key | None}`
    """
    from llmc.artifacts.bundle.native import code_of_bundle
    from llmc.artifacts.bundle.trust import UntrustedError
    from llmc.artifacts.signing.keyring import Keyring, Verdict
    from llmc.settings import Settings

    keyring = Keyring.from_settings(Settings.from_environment())
    content, signature, origin = files.manifest.to_bytes(), files.signature, str(files.folder)
    verdict = Verdict(None, ())
    try:
        if signature is not None:
            verdict = keyring.check(content, signature, origin)
        if keyring.require_signatures:
            native = code_of_bundle(files.manifest) is not None
            keyring.require(content, signature, native=native, origin=origin)
    except UntrustedError as error:
        errors = [str(error)]
    else:
        errors = []
    if verdict.key is not None:
        return {"status": "trusted", "keys": [verdict.key.key.id], "name": verdict.key.name}, errors
    status = "unknown" if verdict.claimed else "none" if signature is None else "invalid"
    return {"status": status, "keys": list(verdict.claimed), "name": None}, errors


def signature_text(found: dict[str, Any]) -> str:
    """`signature_status` in words."""
    from llmc.artifacts.signing.keys import short_id

    keys = ", ".join(short_id(key) or "an unnamed key" for key in found["keys"])
    return {
        "trusted": f"signed by {found['name']} ({keys}), which is trusted",
        "unknown": f"signed by {keys}, which is not trusted here",
        "invalid": "its signature is not valid",
        "none": "not signed",
    }[found["status"]]
