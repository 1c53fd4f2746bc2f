"""Read and write small files: errors name the file, and writes are atomic."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from llmc.errors import InputError


def write_text(path: str | os.PathLike[str], text: str, what: str) -> None:
    """Write `text` to `path` atomically in UTF-8. Raises InputError naming `what` and the path."""
    write_bytes(path, text.encode(), what)


def write_bytes(path: str | os.PathLike[str], content: bytes, what: str) -> None:
    """Write `content` to `path` atomically. Raises InputError naming `what` and the path."""
    with writing(path, what) as file:
        file.write(content)


@contextmanager
def writing(path: str | os.PathLike[str], what: str) -> Iterator[BinaryIO]:
    """Open a file that atomically becomes `path`, with mode 0644, when the block ends. An existing file is replaced.

    Raises InputError, naming `what` (such as "plan") and the path, if it cannot be written.
    """
    import tempfile  # imported here because every start reads files but few write any

    target = Path(path)
    try:
        descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield file
            temporary.chmod(0o644)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"cannot write the {what} to {target}: {error.strerror or error}") from None


def read_text(path: str | os.PathLike[str], what: str) -> str:
    """Read `path` as UTF-8. Raises InputError, naming `what` and the path, if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the {what} {os.fspath(path)}: {error}") from None


def write_texts(folder: Path, texts: Mapping[str, str], what: str) -> list[str]:
    """Write texts by path below `folder`, which is created, and return the paths. Raises InputError naming `what`."""
    for path in {folder, *((folder / name).parent for name in texts)}:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot create the folder {path}: {error.strerror or error}") from None
    for name, text in texts.items():
        write_text(folder / name, text, what)
    return list(texts)
