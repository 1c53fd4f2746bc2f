"""Text that a user typed, as a path. A name that no file can have counts as missing; it never raises.

`pathlib` raises for a name that is too long, and for the home of an unknown user. Only the standard library is
imported.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def expanded(text: str | Path) -> Path:
    """The path with ~ and ~user written out, where there is such a user."""
    from pathlib import Path

    return Path(os.path.expanduser(text))  # noqa: PTH111 - pathlib's raises for a user that is not there


def is_file(path: str | Path) -> bool:
    """Whether a regular file, or a link to one, is there."""
    return os.path.isfile(path)  # noqa: PTH113 - see the module


def is_dir(path: str | Path) -> bool:
    """Whether a folder, or a link to one, is there."""
    return os.path.isdir(path)  # noqa: PTH112 - see the module


def exists(path: str | Path) -> bool:
    """Whether anything is there."""
    return os.path.exists(path)  # noqa: PTH110 - see the module
