"""Recovery of a bundle whose replacement was interrupted."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from llmc.artifacts.bundle.manifest_schema import FILE_NAME
from llmc.artifacts.folder_swap import siblings
from llmc.artifacts.log import logger


def recover(folder: Path) -> bool:
    """Restore a bundle whose replacement was interrupted between the two renames; return whether there was one.

    This can happen only where the system cannot exchange names. A live writer then finds the path occupied and retries.
    """
    if folder.exists():
        return False
    old = [Path(item.path) for item in siblings(folder, "old") if (Path(item.path) / FILE_NAME).is_file()]
    for path in sorted(old, key=lambda path: path.stat().st_mtime, reverse=True):
        with suppress(OSError):
            path.rename(folder)
            logger().warning("%s: restored after an interrupted replacement", folder)
            return True
    return False
