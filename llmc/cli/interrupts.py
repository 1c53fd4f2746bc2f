"""What a command that measures does when it is interrupted: it stops, and shows what it has."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import typer

EXIT = 130
"""As of every command that is interrupted; main says that it was."""


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """SIGTERM is KeyboardInterrupt too, as SIGINT is, in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def end_incomplete(missing: Sequence[str]) -> None:
    """Say what an interrupt left unmeasured, and end the command; does nothing where that is nothing."""
    if missing:
        some = "; ".join(missing[:8]) + (f"; and {len(missing) - 8} more" if len(missing) > 8 else "")
        print(f"llmc: not measured: {some}", file=sys.stderr)
        raise typer.Exit(EXIT)
