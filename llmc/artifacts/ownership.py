"""Who can write to a path: native code that another user could have put there is not loaded."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from llmc.errors import InputError

VARIABLE = "LLMC_TRUSTED_FOLDERS"
MAX_LINKS = 40


class Exposed(NamedTuple):
    """A folder, link or file that users other than this one and root can change, and why."""

    path: str
    why: str
    is_foreign: bool

    def __str__(self) -> str:
        return f"{self.path} {self.why}"

    @property
    def fix(self) -> str:
        """The command that removes the exposure."""
        return (
            f"make it the user's that runs llmc (chown {self.path})" if self.is_foreign else f"chmod go-w {self.path}"
        )

    @property
    def remedy(self) -> str:
        """The fix, or trusting the folder."""
        return f"{self.fix}, or name the folder in {VARIABLE} if you trust all who may write there"


def exposed(
    folder: str | Path,
    files: Iterable[str | Path] = (),
    *,
    users: Collection[int] = (),
    trusted: Iterable[str | Path] = (),
) -> Exposed | None:
    """Return the first thing that other users can change of a folder and `files` in it; None if nothing.

    The folders and links that lead to `folder` are checked as well. `users` are further users whose files are trusted,
    `trusted` are folders that are not checked. Missing files are skipped. The rules are OpenSSH's for the files that
    control logins (safe_path in its misc.c): each must belong to this user or root, and nobody else may write to it.
    Beyond those rules,
        a folder on the way may be writable by all if its sticky bit is set, since then entries stay their owners';
        a folder that holds a link is checked as well, not only the folder that the link leads to;
        a group with a single user may write, and so may the group root;
        a read-only mount is not checked.
    """
    if not hasattr(os, "geteuid"):
        return None
    real = os.path.realpath(folder)
    if any(_is_in(real, os.path.realpath(location)) for location in trusted):
        return None
    judge = _Judge({0, os.geteuid(), *users})
    for path, in_sticky in _way(str(Path(folder).absolute())):
        if (found := judge.on_the_way(path, in_sticky)) is not None:
            return found
    inner = {real} | {parent for file in files for parent in _between(real, os.fspath(file))}
    return next(filter(None, map(judge.inside, (*sorted(inner), *map(str, files)))), None)


def owners(folders: Iterable[str | Path]) -> set[int]:
    """Return the users that own these folders; missing folders are skipped."""
    found = set()
    for folder in folders:
        with suppress(OSError):
            found.add(os.stat(folder).st_uid)  # noqa: PTH116
    return found


class _Judge:
    def __init__(self, users: Collection[int]) -> None:
        self._users = users

    def on_the_way(self, path: str, in_sticky: bool) -> Exposed | None:
        """Check a folder or link on the way; `in_sticky`: it lies in a folder that others may write."""
        seen = os.lstat(path)
        if stat.S_ISLNK(seen.st_mode):
            return self._owned(path, seen) if in_sticky else None
        return self._owned(path, seen) or (None if seen.st_mode & stat.S_ISVTX else self._closed(path, seen))

    def inside(self, path: str) -> Exposed | None:
        try:
            seen = os.stat(path)  # noqa: PTH116
        except OSError:
            return None
        return self._owned(path, seen) or self._closed(path, seen)

    def _owned(self, path: str, seen: os.stat_result) -> Exposed | None:
        if seen.st_uid in self._users or _is_read_only(path):
            return None
        return Exposed(path, f"belongs to {_user_name(seen.st_uid)}", True)

    def _closed(self, path: str, seen: os.stat_result) -> Exposed | None:
        if not _has_other_writers(seen) or _is_read_only(path):
            return None
        who = "every user" if seen.st_mode & stat.S_IWOTH else f"group {_group_name(seen.st_gid)}"
        return Exposed(path, f"can be written by {who} (mode {stat.S_IMODE(seen.st_mode):o})", False)


def is_own(status: os.stat_result) -> bool:
    """Whether only this user may write a file or folder; true on systems without users."""
    return not hasattr(os, "geteuid") or (status.st_uid == os.geteuid() and not _has_other_writers(status))


def may_hold_own(folder: Path) -> bool:
    """Whether only this user may write a folder, or it does not exist."""
    try:
        return is_own(os.stat(folder))  # noqa: PTH116
    except FileNotFoundError:
        return True
    except OSError:
        return False


def own_cache() -> Path:
    """Return the folder for records that only this user may write.

    That is llmc's cache, or the user's cache if others can write to llmc's.
    """
    from llmc.settings import Settings

    try:
        settings = Settings.from_environment()
    except InputError:  # code that reads the settings reports it
        settings = Settings()
    return settings.cache_dir if may_hold_own(settings.cache_dir) else settings.user_cache_dir


def _has_other_writers(status: os.stat_result) -> bool:
    if status.st_mode & stat.S_IWOTH:
        return True
    users = (status.st_uid, os.geteuid())
    return bool(status.st_mode & stat.S_IWGRP) and not any(_is_private_group(status.st_gid, user) for user in users)


def _way(path: str) -> Iterator[tuple[str, bool]]:
    """Yield every folder and link that leads to `path`, from the root, and whether each lies in a sticky folder.

    Ends with the target of `path`, or where something is missing or there are more than MAX_LINKS links.
    """
    todo, at, links = path.split("/")[:0:-1], "/", 0
    yield at, False
    while todo:
        name = todo.pop()
        if name in ("", "."):
            continue
        if name == "..":
            at = os.path.dirname(at)  # noqa: PTH120
            continue
        try:
            sticky = bool(os.stat(at).st_mode & stat.S_ISVTX)  # noqa: PTH116
            inner = os.path.join(at, name)  # noqa: PTH118
            target = os.readlink(inner) if stat.S_ISLNK(os.lstat(inner).st_mode) else None  # noqa: PTH115
        except OSError:
            return
        yield inner, sticky
        if target is None:
            at = inner
            continue
        links += 1
        if links > MAX_LINKS:
            return
        todo += target.split("/")[::-1]
        at = "/" if target.startswith("/") else at


def _between(folder: str, file: str) -> Iterator[str]:
    at = os.path.dirname(os.path.realpath(file))  # noqa: PTH120
    while _is_in(at, folder) and at != folder:
        yield at
        at = os.path.dirname(at)  # noqa: PTH120


def _is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


def _is_read_only(path: str) -> bool:
    with suppress(OSError):
        return bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    return False


def _user_name(uid: int) -> str:
    with suppress(ImportError, KeyError):
        import pwd

        return f"user {pwd.getpwuid(uid).pw_name}"
    return f"user {uid}"


def _group_name(gid: int) -> str:
    with suppress(ImportError, KeyError):
        import grp

        return grp.getgrgid(gid).gr_name
    return str(gid)


@cache
def _is_private_group(gid: int, uid: int) -> bool:
    """Whether a group is root's, or has only the user of its name, as systems create one for each user."""
    with suppress(ImportError, KeyError):
        import grp
        import pwd

        group = grp.getgrgid(gid)
        if gid == 0:
            return set(group.gr_mem) <= {"root"}
        user = pwd.getpwuid(uid)
        return user.pw_gid == gid and user.pw_name == group.gr_name and set(group.gr_mem) <= {user.pw_name}
    return False
