"""Plots and tables of a store: disk usage, last use, and what a collection would remove first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.buckets.render.page import check

if TYPE_CHECKING:
    from llmc.artifacts.overview.survey import Survey
    from llmc.artifacts.signing.keyring import Keyring
    from llmc.artifacts.store.entries import Entry


def draw(path: Path, survey: Survey, keyring: Keyring, describe: Callable[[Entry], str]) -> None:
    """Write plots of a store to `path`: a .png image, or a self-contained .html page that also has tables.

    `keyring` decides whose signatures count; `describe` returns one line on what an entry was built from. The store is
    only read. Equal arguments give equal bytes; the file is written whole or not at all.

    Raises InputError for another suffix or if the file cannot be written; DeviceError if matplotlib is not installed.
    """
    check(path)
    from llmc.artifacts.overview import pictures, tables
    from llmc.artifacts.overview.survey import bundles
    from llmc.buckets.render import page

    held = bundles(survey, keyring)
    page.write(
        path, pictures.title(survey), pictures.plots(survey, held), lambda: tables.sections(survey, held, describe)
    )
