"""Names of processes that Python code starts, as the interpreter's audit events tell them.

An audit hook stays for as long as its process (PEP 578), so there is one, which passes events on while somebody
listens. Events and their arguments: docs.python.org/3.11/library/audit_events.html.
"""

from __future__ import annotations

import os
import shlex
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

Tell = Callable[[str], None]

_tells: list[Tell] = []
_lock = threading.Lock()
_hooked = False
_here = threading.local()


def listen(tell: Tell) -> None:
    """`tell` hears the name of each process that Python code is about to start, in the thread that starts it."""
    global _hooked  # noqa: PLW0603 - hooks are the interpreter's
    with _lock:
        _tells.append(tell)
        if not _hooked:
            sys.addaudithook(_heard)
            if hasattr(os, "register_at_fork"):  # what a fork starts is its own, and nobody there frees a lock
                os.register_at_fork(after_in_child=_tells.clear)
            _hooked = True


def unlisten(tell: Tell) -> None:
    """The end of `listen`."""
    with _lock:
        _tells.remove(tell)


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    if not _tells or not event.startswith(("subprocess.", "os.")):
        return
    name = None
    with suppress(Exception):  # an error would be raised in the code that starts the process
        name = _name(event, arguments)
    if name is not None:
        for tell in tuple(_tells):
            tell(name)


def _name(event: str, arguments: tuple[Any, ...]) -> str | None:
    if event == "subprocess.Popen":
        executable, given = arguments[:2]
        words = shlex.split(os.fsdecode(given)) if isinstance(given, str | bytes) else [os.fsdecode(a) for a in given]
        _here.started = given  # Popen may go on to os.posix_spawn with this list, an event of its own
        return command_name([os.fsdecode(executable or words[0]), *words[1:]])
    if event == "os.posix_spawn":
        path, given = arguments[:2]
        if given is getattr(_here, "started", None):
            return None
        return command_name([os.fsdecode(path), *(os.fsdecode(a) for a in given[1:])])
    if event == "os.system":
        return command_name(["sh", "-c", os.fsdecode(arguments[0])])
    if event in ("os.fork", "os.forkpty"):
        return "a fork of this process"
    return None


def command_name(words: Sequence[str]) -> str:
    """A command in a few words, without paths and values: the program, and what an interpreter or a shell runs."""
    program = os.path.basename(words[0])  # noqa: PTH119 - of any system's form
    rest = list(words[1:])
    if program in ("sh", "bash", "dash") and rest[:1] == ["-c"] and len(rest) > 1:
        with suppress(ValueError):
            return f"{program} -c {os.path.basename(shlex.split(rest[1])[0])}"  # noqa: PTH119
    if program.startswith("python"):
        while rest and rest[0].startswith("-") and rest[0] not in ("-c", "-m"):
            rest.pop(0)
        if rest[:1] == ["-c"]:
            return f"{program} -c {_module(rest[1:])}".strip()
        if rest[:1] == ["-m"]:
            return " ".join([program, *rest[:2]])
        if rest:
            return f"{program} {os.path.basename(rest[0])}"  # noqa: PTH119
    return program


def _module(code: Sequence[str]) -> str:
    """The module of llmc that a nursery runs (runtime/confined/pool.py); nothing of other code."""
    _, found, rest = "".join(code[:1]).partition("from llmc.")
    return f"llmc.{rest.split(' ', maxsplit=1)[0]}" if found else ""
