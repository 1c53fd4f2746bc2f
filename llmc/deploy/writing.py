"""Rendered files on disk: each whole or not there, and none of the user's is replaced unasked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from llmc.errors import InputError
from llmc.files import write_text


def write(folder: Path, files: Mapping[str, str], *, force: bool = False) -> None:
    """Write texts by path below `folder`, which is made. Files that hold the same already are left alone.

    Raises InputError, before anything is written, where a file is there with other content and not `force`; and where
    something cannot be written.
    """
    todo = {folder / path: text for path, text in files.items() if not _holds(folder / path, text)}
    if not force and (there := sorted(str(path) for path in todo if path.exists() or path.is_symlink())):
        raise InputError(f"{', '.join(there)} would be replaced; name another folder with -o, or add --force")
    for path, text in todo.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot make the folder {path.parent}: {error.strerror or error}") from None
        write_text(path, text, "deployment file")


def _holds(path: Path, text: str) -> bool:
    try:
        return path.read_bytes() == text.encode()
    except OSError:
        return False
