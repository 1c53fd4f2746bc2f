"""Files of plots: a .png picture, or a self-contained .html page with text beside the plots."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from llmc.files import write_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from llmc.buckets.render.figure import Plot

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>body{{font:14px system-ui,sans-serif;max-width:80rem;margin:2rem auto;padding:0 1rem;color:#24292f}}
pre{{overflow-x:auto;background:#f6f8fa;padding:1rem}}svg{{max-width:100%;height:auto}}h2{{font-size:1.2rem}}
h3{{font-size:1rem}}</style>
</head><body><h1>{title}</h1>{body}</body></html>
"""


def write(path: Path, title: str, plots: Sequence[Plot], body: Callable[[], str]) -> None:
    """Write `plots` as a picture, or a page of `body`'s HTML, to `path`, which buckets.plots.check has passed.

    Raises InputError when the file cannot be written.
    """
    from llmc.buckets.render import figure

    if path.suffix.lower() == ".png":
        content = figure.png(title, plots)
    else:
        content = PAGE.format(title=html.escape(title), body=body()).encode()
    write_bytes(path, content, "plots")


def pre(text: str) -> str:
    """Text as it stands, in HTML."""
    return f"<pre>{html.escape(text)}</pre>"
