"""Putting a bundle back whose replacement was cut off."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from llmc.artifacts.bundle.manifest_schema import FILE_NAME
from llmc.artifacts.folder_swap import siblings
from llmc.artifacts.log import logger


def recover(folder: Path) -> bool:
    """Put back a bundle whose replacement was cut off between the two renames; whether there was one.

    That can happen only where names cannot be exchanged. A live writer finds its place taken and tries again.
    """
    if folder.exists():
        return False
    old = [Path(item.path) for item in siblings(folder, "old") if (Path(item.path) / FILE_NAME).is_file()]
    for path in sorted(old, key=lambda path: path.stat().st_mtime, reverse=True):
        with suppress(OSError):
            path.rename(folder)
            logger().warning("%s: put back after an interrupted replacement", folder)
            return True
    return False
