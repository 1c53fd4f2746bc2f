"""`llmc cache ls`: what the store holds, how much of it is whose, and what is kept from being collected."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmc.buckets.render.text import size_text
from llmc.cli.cache.common import (
    CacheDirFlag,
    JsonFlag,
    age_text,
    open_cache,
    print_json,
    print_table,
    show_value,
)
from llmc.cli.options import option
from llmc.cli.output import echo

if TYPE_CHECKING:
    from llmc.artifacts.overview.survey import Listed
    from llmc.artifacts.store.audit import StoreUsage
    from llmc.artifacts.store.entries import Entry

SUMMARY_WIDTH = 90
ORDER = {"cache": -3, "model": -2, "version": -1, "shape": -1, "input": 1, "option": 1, "toolchain": 2, "isa": 3}
"""Groups of components that come first, and those that most entries have in common."""
TITLES = ("KIND", "KEY", "SIZE", "OWN", "SHARED", "USED", "STATE", "COMPONENTS")


def list_entries(
    kind: Annotated[str | None, option("--kind", "KIND", "Only entries of this kind.")] = None,
    plot: Annotated[
        Path | None,
        option("--plot", "OUT", "Draw all of the store: a .png, or a self-contained .html.", show_default=False),
    ] = None,
    cache_dir: CacheDirFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """List what is stored: kind, key, size, time since it was used, and what it was made from.

    OWN is what goes with the entry, SHARED what other entries name as well. What is pinned or in use is not collected.
    --plot draws where the bytes are; the .html lists bundles, entries, pins, and what `llmc cache gc` takes first.

    \b
    Example:
      llmc cache ls
      llmc cache ls --plot store.html
      llmc cache ls --kind bundle
      llmc cache ls --kind executable --json
    """
    from llmc.artifacts.overview.survey import take

    if plot is not None:
        from llmc.buckets.render.page import check

        check(plot)
    survey = take(open_cache(cache_dir))
    if plot is not None:
        from llmc.artifacts.overview import draw
        from llmc.artifacts.signing.keyring import Keyring
        from llmc.settings import Settings

        draw(plot, survey, Keyring.from_settings(Settings.from_environment()), _summary)
        echo(f"wrote {plot}", err=True)
    listed = [one for one in survey.entries if kind in (None, one.entry.key.kind)]
    if as_json:
        print_json(
            {
                "root": str(survey.root),
                "usage": survey.usage._asdict() | {"total": survey.usage.total},
                "entries": [_as_json(one) for one in listed],
            }
        )
        return
    print_table(TITLES, map(_row, listed))
    echo(f"{len(listed)} entries; {_usage_text(survey.usage, survey.root)}")


def entry_json(entry: Entry) -> dict[str, Any]:
    """An entry as JSON."""
    return {
        "kind": entry.key.kind,
        "key": entry.key.digest,
        "size": entry.size,
        "created": entry.created,
        "used": entry.used,
        "components": dict(entry.key.components),
        "outputs": {name: blob._asdict() for name, blob in entry.outputs.items()},
        "meta": dict(entry.meta),
    }


def _row(listed: Listed) -> tuple[str, ...]:
    key, share = listed.entry.key, listed.share
    marks = ", ".join(name for name, holds in (("pinned", listed.pinned), ("in use", listed.in_use)) if holds)
    sizes = (size_text(share.size), size_text(share.own), size_text(share.shared))
    return key.kind, key.short, *sizes, age_text(listed.used), marks, _summary(listed.entry)


def _as_json(listed: Listed) -> dict[str, Any]:
    share = listed.share
    facts = {"size": share.size, "own": share.own, "shared": share.shared}
    state = {"pinned": listed.pinned, "in_use": listed.in_use, "used": listed.used}
    return {**entry_json(listed.entry), **facts, **state}


def _usage_text(usage: StoreUsage, root: Path) -> str:
    """What is on the disk in all, and how much of it is neither entries nor blobs."""
    others = ((usage.bundle_bytes, "bundle folders alone"), (usage.other_bytes, "quarantine and temporaries"))
    rest = ", ".join(f"{size_text(size)} of it in {what}" for size, what in others if size)
    return f"{usage.blobs} blobs, {size_text(usage.total)} on disk in {root}" + (f"; {rest}" if rest else "")


def _summary(entry: Entry) -> str:
    """What an entry was made from, on one line: the components that are no digests; for a bundle, what it is."""
    from llmc.artifacts.bundle.stored import KIND
    from llmc.artifacts.digest import is_digest

    if entry.key.kind == KIND:
        model, device, count = (entry.meta.get(name, "?") for name in ("model", "device", "executables"))
        text = f"{model or 'a model'} for {device}, {count} executables"
    else:
        items = sorted(entry.key.components.items(), key=lambda item: ORDER.get(item[0].partition(".")[0], 0))
        text = " ".join(
            f"{name}={show_value(value)}" for name, value in items if not is_digest(value) and name != "code"
        )
    return text if len(text) <= SUMMARY_WIDTH else text[: SUMMARY_WIDTH - 1] + "…"


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("ls")(list_entries)
