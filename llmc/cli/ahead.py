"""`llmc generate` opens its bundle's executor while the command line is still being read.

Building the parser takes about a tenth of a second of Python, opening the first executable as long in native code. This
module guesses the bundle from the bare words of the command line. A wrong guess only costs time, because the command
checks everything again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.errors import LlmcError
from llmc.paths import is_file

if TYPE_CHECKING:
    from llmc.runtime.startup.overlapped import StartingExecutor

_ELSEWHERE = (
    "--help",
    "--device",
    "--quantize",
    "--max-model-len",
    "--weights",
    "--speculat",
    "--prefill",
    "--enforce-eager",
)
"""Options with which another executor is opened, or none."""
_started: list[StartingExecutor] = []


def begin(arguments: Sequence[str]) -> None:
    """Start opening the one bundle folder among the arguments of `generate`; does nothing in case of doubt."""
    words = [a for a in arguments if not a.startswith("-")]
    folders = [word for word in words if is_file(Path(word, "manifest.json"))]
    if len(folders) != 1 or any(a.startswith(_ELSEWHERE) for a in arguments):
        return
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.startup.opening import EngineOptions
    from llmc.runtime.startup.overlapped import StartingExecutor, opens_in_thread

    try:
        bundle = Bundle.open(folders[0])
        if opens_in_thread(bundle):
            _started.append(StartingExecutor(bundle, EngineOptions(_threads(arguments))))
    except (LlmcError, ImportError, ValueError):
        return  # the command meets the same error and reports it


def take(folder: str | Path) -> StartingExecutor | None:
    """The executor that is being opened for this folder, given out once; the caller owns it."""
    if _started and _started[0].bundle.path == Path(folder):
        return _started.pop()
    return None


def drop() -> None:
    """Close an executor that was begun and not taken."""
    while _started:
        _started.pop().abandon()


def _threads(arguments: Sequence[str]) -> int | None:
    """The last --threads; raises ValueError if it is not a number of threads."""
    given = None
    for i, argument in enumerate(arguments):
        if argument == "--threads":
            given = "".join(arguments[i + 1 : i + 2])
        elif argument.startswith("--threads="):
            given = argument.removeprefix("--threads=")
    if given is not None and int(given) < 1:
        raise ValueError(given)
    return None if given is None else int(given)
