"""Who may write to a place. Files that others may write are not trusted, and a warning says so."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from functools import cache
from pathlib import Path


def anybody_writes(folder: str | Path) -> bool:
    """Whether every user of the machine may put files into a folder and replace those of others. Raises OSError."""
    mode = os.stat(folder).st_mode  # noqa: PTH116
    if not mode & stat.S_IWOTH or mode & stat.S_ISVTX:
        return False
    return not hasattr(os, "statvfs") or not os.statvfs(folder).f_flag & os.ST_RDONLY


def is_own(status: os.stat_result) -> bool:
    """Whether only this user may write a file or folder; true on systems without users."""
    if not hasattr(os, "geteuid"):
        return True
    if status.st_uid != os.geteuid() or status.st_mode & stat.S_IWOTH:
        return False
    return not status.st_mode & stat.S_IWGRP or _is_private_group(status.st_gid, status.st_uid)


@cache
def _is_private_group(gid: int, uid: int) -> bool:
    """Whether a group has one user alone, by name, as systems make one for each user."""
    with suppress(ImportError, KeyError):
        import grp
        import pwd

        user, group = pwd.getpwuid(uid), grp.getgrgid(gid)
        return user.pw_gid == gid and user.pw_name == group.gr_name and set(group.gr_mem) <= {user.pw_name}
    return False
