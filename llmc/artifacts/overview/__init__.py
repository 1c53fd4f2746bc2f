"""A store as pictures and tables: what takes up the disk, what is used, and what a collection would take first."""

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
    """Write plots of a store to `path`: a .png picture, or a self-contained .html page that has tables as well.

    `keyring` says whose signatures count, `describe` what an entry was made from, in one line. The store is only read.
    Equal arguments give equal bytes; the file is written whole or not at all.

    Raises InputError for another suffix and when the file cannot be written; DeviceError when matplotlib is not
    installed.
    """
    check(path)
    from llmc.artifacts.overview import pictures, tables
    from llmc.artifacts.overview.bundles import bundles
    from llmc.buckets.render import page

    held = bundles(survey, keyring)
    page.write(
        path, pictures.title(survey), pictures.plots(survey, held), lambda: tables.sections(survey, held, describe)
    )
