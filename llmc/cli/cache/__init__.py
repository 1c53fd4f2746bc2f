"""`llmc cache`: the artifact store, and the bundles in it and elsewhere."""

from __future__ import annotations

import typer

from llmc.cli.cache.explain import Explain
from llmc.cli.cache.foreign import Pack, Unpack
from llmc.cli.cache.look import List, Show, Verify
from llmc.cli.cache.signing import Keygen, Sign, Trust
from llmc.cli.cache.space import Collect, Pin, Unpin
from llmc.cli.cache.transfer import Export, Import, Pull, Push
from llmc.cli.options import add

COMMANDS = {
    "ls": List, "show": Show, "verify": Verify, "gc": Collect, "pin": Pin, "unpin": Unpin, "explain": Explain,
    "sign": Sign, "keygen": Keygen, "trust": Trust, "push": Push, "pull": Pull, "export": Export, "import": Import,
    "pack": Pack, "unpack": Unpack,
}  # fmt: skip

app = typer.Typer(
    help="Look into the artifact store and into bundles; trim, share, export and sign them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
for name, command in COMMANDS.items():
    add(app, name, command)
