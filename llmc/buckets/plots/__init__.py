"""Plans as pictures: maps of their buckets, their padding, and the padding of other numbers of graphs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.errors import InputError
from llmc.platforms import missing

if TYPE_CHECKING:
    from llmc.buckets.frontier import FrontierPoint
    from llmc.buckets.plan import Plan
    from llmc.buckets.traffic.source import Traffic

SUFFIXES = (".png", ".html")


def check(path: Path) -> None:
    """Raise InputError for a file name that plots cannot be drawn to, DeviceError without matplotlib."""
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(f"cannot draw to {path}: give a file name that ends in {' or '.join(SUFFIXES)}")
    try:
        import matplotlib  # noqa: F401 - only whether it is there; what draws imports what it needs
    except ImportError:
        raise missing("matplotlib") from None


def draw(
    path: Path, plans: Sequence[tuple[str, Plan]], traffic: Traffic | None, frontier: Sequence[FrontierPoint]
) -> None:
    """Write plots of `plans`, at least one (name, plan), to `path`: a .png picture or a self-contained .html page.

    With `traffic`, which each plan replays, they show its waste and compare the plans; without, only which bucket
    serves what. `frontier` may be empty. The page also has tables of what the plots show. Equal arguments give equal
    bytes; the file is written whole or not at all.

    Raises InputError for another suffix, for no plan, for traffic that cannot be read, and when the file cannot be
    written; DeviceError when matplotlib is not installed.
    """
    path = Path(path)
    check(path)
    if not plans:
        raise InputError("there is no plan to draw; give at least one")
    from llmc.buckets.plots import data, html, page

    views = data.gather(plans, traffic)
    page.write(path, page.title(views), page.plots(views, frontier), lambda: html.sections(views, frontier))
