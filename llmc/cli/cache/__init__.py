"""`llmc cache`: work with the artifact store and with bundles."""

from __future__ import annotations

import typer

from llmc.cli.cache.look import CacheExplainCommand, CacheListCommand, CacheShowCommand, CacheVerifyCommand
from llmc.cli.cache.signing import CacheKeygenCommand, CacheSignCommand, CacheTrustCommand
from llmc.cli.cache.space import CacheCollectCommand, CachePinCommand, CacheRemoveCommand, CacheUnpinCommand
from llmc.cli.cache.transfer import (
    CacheExportCommand,
    CacheImportCommand,
    CachePackCommand,
    CachePullCommand,
    CachePushCommand,
    CacheUnpackCommand,
)
from llmc.cli.options import add

COMMANDS = {
    "ls": CacheListCommand,
    "show": CacheShowCommand,
    "verify": CacheVerifyCommand,
    "gc": CacheCollectCommand,
    "rm": CacheRemoveCommand,
    "pin": CachePinCommand,
    "unpin": CacheUnpinCommand,
    "explain": CacheExplainCommand,
    "sign": CacheSignCommand,
    "keygen": CacheKeygenCommand,
    "trust": CacheTrustCommand,
    "push": CachePushCommand,
    "pull": CachePullCommand,
    "export": CacheExportCommand,
    "import": CacheImportCommand,
    "pack": CachePackCommand,
    "unpack": CacheUnpackCommand,
}

app = typer.Typer(
    help="Inspect, trim, share, export and sign the artifact store and bundles.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
for name, command in COMMANDS.items():
    add(app, name, command)
