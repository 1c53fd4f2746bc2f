"""A device's compiler as a process of its own, which leaves nothing running behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def run_tool(
    command: Sequence[str],
    folder: str | Path,
    out: int,
    seconds: float,
    environment: Mapping[str, str] | None = None,
) -> int | None:
    """The exit code of a process that works in `folder` and writes to the file `out`, negative for a signal; None where
    it was stopped after `seconds`. It is a process group of its own, which ends with it, and with this process."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=out,
        env=environment,
        process_group=0,
        preexec_fn=_die_with_parent(),  # noqa: PLW1509 - one call of the C library
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _die_with_parent() -> Callable[[], object] | None:
    """A killed worker leaves no compiler behind."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    return lambda: library.prctl(_DIE_WITH_PARENT, signal.SIGKILL)
