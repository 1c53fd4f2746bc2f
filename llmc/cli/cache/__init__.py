"""`llmc cache`: one file for each group of commands."""

from __future__ import annotations

import typer

from llmc.cli.cache import explain, foreign, listing, look, sign, space, transfer, trust

GROUPS = (listing, look, space, explain, sign, trust, transfer, foreign)


app = typer.Typer(
    help="Look into the artifact store and into bundles; trim, share, export and sign them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
for group in GROUPS:
    group.register(app)


def register(root: typer.Typer) -> None:
    """Add the command group to `root`."""
    root.add_typer(app, name="cache")
