"""Paths typed by a user. A name that no file can have counts as missing and never raises.

`pathlib` raises for names that are too long and for the home of an unknown user. Only the standard library is imported.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def expanded(text: str | Path) -> Path:
    """Expand ~ and ~user; an unknown user's ~ is left as it is."""
    from pathlib import Path

    return Path(os.path.expanduser(text))  # noqa: PTH111 - pathlib raises for an unknown user


def is_file(path: str | Path) -> bool:
    """Whether the path is a regular file or a link to one."""
    return os.path.isfile(path)  # noqa: PTH113 - see the module


def is_dir(path: str | Path) -> bool:
    """Whether the path is a folder or a link to one."""
    return os.path.isdir(path)  # noqa: PTH112 - see the module


def exists(path: str | Path) -> bool:
    """Whether the path exists."""
    return os.path.exists(path)  # noqa: PTH110 - see the module
