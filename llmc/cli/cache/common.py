"""Helpers shared by the `llmc cache` commands."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.cli.output import echo
from llmc.paths import is_dir
from llmc.settings import Settings

if TYPE_CHECKING:
    from llmc.artifacts.store.store import Store


def open_cache(cache_dir: Path | None) -> Store:
    """Open the store that a command works on."""
    from llmc.artifacts.local.opening import open_store

    return open_store(cache_dir, Settings.from_environment())


def is_bundle(text: str) -> bool:
    """Whether an argument is a path or a bundle reference; anything else is a key."""
    from llmc.artifacts.local.references import is_reference

    return os.sep in text or is_dir(text) or is_reference(text)


def bundle_folder(text: str, store: Store) -> Path:
    """The bundle folder: `text` itself, or the checkout of the referenced bundle."""
    from llmc.artifacts.local.references import resolve

    return resolve(text, Settings.from_environment(), store)


def print_json(value: object) -> None:
    """Print a value as JSON."""
    echo(json.dumps(value, indent=2, sort_keys=True))


def show_value(value: object) -> str:
    """Format a value for people: text unchanged, anything else as JSON."""
    from llmc.artifacts.key import Absent

    if isinstance(value, str) and value.isprintable():
        return value
    return repr(value) if isinstance(value, Absent) else json.dumps(value, sort_keys=True)


def age_text(moment: float) -> str:
    """Format the time since `moment` (seconds since 1970), for example "3 h"."""
    seconds = max(0.0, time.time() - moment)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
