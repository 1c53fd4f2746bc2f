"""Reading and writing the small files of this package: errors name the file, a write is all or nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from llmc.errors import InputError


def write_text(path: str | os.PathLike[str], text: str, what: str) -> None:
    """Write `text` to `path` in UTF-8, as `write_bytes` does."""
    write_bytes(path, text.encode(), what)


def write_bytes(path: str | os.PathLike[str], content: bytes, what: str) -> None:
    """Write `content` to `path`, as `writing` does."""
    with writing(path, what) as file:
        file.write(content)


@contextmanager
def writing(path: str | os.PathLike[str], what: str) -> Iterator[BinaryIO]:
    """A file whose content is at `path` with mode 0644 at the end, all of it or nothing; an older file is replaced.

    Raises InputError, naming `what` ("plan") and the path, when it cannot be written.
    """
    import tempfile  # imported here, because every start reads a plan and does not need it

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
    """The text of `path`, which is UTF-8. Raises InputError, naming `what` and the path, when it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the {what} {os.fspath(path)}: {error}") from None


def write_texts(folder: Path, texts: Mapping[str, str], what: str) -> list[str]:
    """Write texts by path below `folder`, which is made, and return the paths. Raises InputError, naming `what`."""
    for path in {folder, *((folder / name).parent for name in texts)}:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot make the folder {path}: {error.strerror or error}") from None
    for name, text in texts.items():
        write_text(folder / name, text, what)
    return list(texts)
