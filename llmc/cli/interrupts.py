"""Interrupts of measuring commands: they stop and print the results so far."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import typer

from llmc.cli.output import echo

EXIT = 130
"""The exit code of every interrupted command; main prints that it was interrupted."""


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Turn SIGTERM into KeyboardInterrupt, as SIGINT is, in the main thread."""
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
    """Print the measurements that an interrupt left out and exit; do nothing if there are none."""
    if missing:
        some = "; ".join(missing[:8]) + (f"; and {len(missing) - 8} more" if len(missing) > 8 else "")
        echo(f"llmc: not measured: {some}", err=True)
        raise typer.Exit(EXIT)
