"""Which paths a packed cache may have, wherever it comes from.

path = part ("/" part)*      at most 1024 bytes in UTF-8
part = 1 to 255 bytes of printable characters, neither "." nor "..", without "/" and "\\\\"
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

MAX_PATH_BYTES = 1024
MAX_PART_BYTES = 255


def path_problem(path: str) -> str | None:
    """What is wrong with a path, in words; None for one by the grammar."""
    if not path.isprintable():
        return "it has characters that cannot be printed, or is not UTF-8"
    if len(path.encode()) > MAX_PATH_BYTES:
        return f"it is longer than {MAX_PATH_BYTES} bytes"
    for part in path.split("/"):
        if part in {"", ".", ".."} or "\\" in part:
            return "it leads out of its folder, or is not in its plainest form"
        if len(part.encode()) > MAX_PART_BYTES:
            return f"a part of it is longer than {MAX_PART_BYTES} bytes"
    return None


def paths_problem(files: Collection[str], folders: Iterable[str]) -> str | None:
    """What is wrong with the paths of a tree's files and empty folders; None when they can all be made."""
    names = [*files, *folders]
    for path in names:
        if (problem := path_problem(path)) is not None:
            return f"{path!r:.200}: {problem}"
    taken = set(names)
    if len(taken) != len(names):
        return "a path occurs twice"
    for path in names:
        parent = path.rpartition("/")[0]
        while parent:
            if parent in taken:
                return f"{parent!r:.200} is a file, or an empty folder, and has {path!r:.200} in it"
            parent = parent.rpartition("/")[0]
    return None
