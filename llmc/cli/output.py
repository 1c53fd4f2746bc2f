"""Output of commands, progress on stderr (a bar with ETA on a terminal, plain lines elsewhere), and interrupts."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from llmc.shown import shown, shown_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import TextIO

    from llmc.compiler.pipeline.compile import Event


quiet = False
"""Set by main from -q: no progress output."""
verbose = False
"""Set by main from -v: more output."""
command: list[str] = []
"""Set by main: the arguments of the command line."""
going_on = ""
"""How to continue after an interrupt; main prints it for commands that can be resumed."""

REPORTED_FROM_S = 10.0
"""Compiles that are expected to take at least this many seconds announce it."""
SILENT_S = 5.0
MAX_COLUMNS = 100
"""Width of wrapped text."""
MIN_CELL = 24
"""Columns that the last cell of a table needs to be wrapped."""

_STAGES = {
    "read": "MB of the checkpoint read",
    "trace": "trace",
    "lower": "lower",
    "weights": "weights",
    "pack": "pack weights",
    "sense": "measure 4-bit sensitivity",
    "mix": "choose what stays in 8 bits",
    "tokenizer": "tokenizer",
    "reference": "reference model",
    "local-reference": "reference model",
    "verify": "verify",
    "diagnose": "find the layer that differs",
    "program": "trace",
}


def echo(text: str = "", *, nl: bool = True, err: bool = False, verbatim: bool = False) -> None:
    """Print text for people. Control characters are escaped (llmc/shown.py); line ends are kept.

    On a terminal, long sentences are wrapped (`wrapped`). `verbatim`: the text is meant to be copied or read by a
    program, so it is not wrapped.
    """
    stream = sys.stderr if err else sys.stdout
    text = shown_lines(text)
    stream.write((text if verbatim else wrapped(text, stream)) + "\n" * nl)
    stream.flush()


def wrapped(text: str, stream: TextIO) -> str:
    """Wrap the long lines of a text at spaces if `stream` is a terminal; further lines are indented by two spaces.

    Lines fit the terminal, and at most MAX_COLUMNS. JSON, and rows of tables (lines with several spaces side by side)
    stay as they are. Elsewhere than on a terminal, the text is unchanged: programs read it line by line.
    """
    if not stream.isatty() or text.startswith(("{", "[")):
        return text
    columns = _columns()
    return "\n".join(
        line if len(line) <= columns or "  " in line.strip() else "\n".join(_folded(line, columns, "  "))
        for line in text.split("\n")
    )


def _columns() -> int:
    import shutil

    return max(40, min(shutil.get_terminal_size((MAX_COLUMNS, 24)).columns, MAX_COLUMNS))


def _folded(line: str, columns: int, indent: str) -> list[str]:
    import textwrap

    begin = line[: len(line) - len(line.lstrip())]
    return textwrap.wrap(
        line, columns, subsequent_indent=begin + indent, break_long_words=False, break_on_hyphens=False
    )


def print_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table with two spaces between columns; the last column is not padded, and is wrapped on a terminal."""
    table = [[shown(cell) for cell in row] for row in (titles, *rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(titles) - 1)]
    begin = sum(widths) + 2 * len(widths)
    for row in table:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        line = "  ".join([*cells, row[-1]]).rstrip()
        if sys.stdout.isatty() and len(line) > (columns := _columns()) and columns - begin >= MIN_CELL:
            first, *more = _folded(row[-1], columns - begin, "")
            line = "\n".join(["  ".join([*cells, first]), *(" " * begin + part for part in more)])
        echo(line, verbatim=True)


def say(text: str) -> None:
    """Print model output unchanged, except that control characters are escaped on a terminal."""
    if sys.stdout.isatty():
        text = shown_lines(text)
    sys.stdout.write(text)
    sys.stdout.flush()


class CompileProgress:
    """Context manager and reporter that prints a compile's events.

    Where stderr is not a terminal, a line names the current stage after SILENT_S seconds without output.
    """

    def __init__(self, hidden: bool) -> None:
        self._quiet = hidden or quiet
        self._live = sys.stderr.isatty() and not self._quiet
        self._progress: Any = None
        self._tasks: dict[str, Any] = {}
        self._part_shown = 0.0
        self._stage, self._said_at, self._ends_at = "", time.monotonic(), 0.0
        self._ended = threading.Event()
        self._expected: Callable[[], float] | None = None

    def __enter__(self) -> CompileProgress:
        if self._live:
            self._progress = _bars()
            self._progress.start()
        elif not self._quiet:
            threading.Thread(target=self._say_what_goes_on, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._progress:
            self._progress.stop()

    def _say_what_goes_on(self) -> None:
        while not self._ended.wait(1.0):
            if self._stage and time.monotonic() - self._said_at > SILENT_S:
                left = self._ends_at - time.monotonic()
                self._line(f"{self._stage} …" + (f" about {left:.0f} s left in all" if left > 0 else ""))

    def _begin(self, expected: float) -> None:
        if expected < REPORTED_FROM_S:
            return
        self._ends_at = time.monotonic() + expected
        if self._progress:
            self._progress.add_task("in all", total=None, expected=expected)
        else:
            self._line(f"this takes about {expected:.0f} s")

    def __call__(self, event: Event) -> None:
        from llmc.compiler.pipeline.compile import BeginReport, ExecutableReport, VerifyReport

        if self._quiet:
            return
        if isinstance(event, BeginReport):
            self._expected = event.expected
            return
        if self._expected is not None:  # not announced earlier: a compile refused before its first stage takes no time
            self._begin(self._expected())
            self._expected = None
        if isinstance(event, ExecutableReport):
            done = "cached" if event.cached else f"{event.seconds:.1f} s"
            size = f"{event.size / 1e6:.2f} MB"
            self._line(f"[{event.index}/{event.total}] {event.shape}: {event.state}, {size}, {done}")
            self._bar("compile", event.index, event.total)
        elif isinstance(event, VerifyReport):
            self._part("verify", event.done, event.total)
        elif event.seconds is None:
            name = _STAGES.get(event.name, event.name)
            if event.total > 1:
                self._part(name, event.index, event.total)
            else:
                self._stage = name
                self._bar(name, 0, 1)
        else:
            name = _STAGES.get(event.name, event.name)
            self._stage = "compile"
            self._bar(name, event.index, event.total)
            if name != "verify":
                number = f"[{event.index}/{event.total}] " if event.total > 1 else ""
                self._line(f"{number}{name}: {'from the store' if event.cached else f'{event.seconds:.1f} s'}")

    def _part(self, name: str, done: int, total: int) -> None:
        """A bar on a terminal; otherwise a line every few seconds."""
        self._bar(name, done, total)
        if not self._live and time.monotonic() - self._part_shown > 5:
            self._part_shown = time.monotonic()
            self._line(f"{name}: {done} of {total}")

    def _line(self, text: str) -> None:
        self._said_at = time.monotonic()
        if self._progress:
            self._progress.console.print(shown_lines(text), highlight=False, markup=False)
        else:
            echo(text, err=True)

    def _bar(self, name: str, done: int, total: int) -> None:
        if not self._progress:
            return
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=total)
        self._progress.update(self._tasks[name], completed=done, total=total, visible=done < total)


class _Bar:
    """One bar on a terminal, created when there is something to show and removed when its block ends."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._began = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _start(self, bar: Any, total: int) -> None:
        self._bar = bar
        self._bar.add_task(self._label, total=total)
        self._bar.start()


class StepProgress(_Bar):
    """Numbered steps of one kind: a bar with ETA on a terminal, one line per step elsewhere.

    Nothing is shown during the first `after` seconds.
    """

    def __init__(self, label: str, hidden: bool = False, after: float = 0.0) -> None:
        super().__init__(label)
        self._quiet = hidden or quiet
        self._after = after

    def __call__(self, text: str, done: int, total: int) -> None:
        """Report that step `done` of `total` ended; `text` describes it."""
        if self._quiet or time.monotonic() < self._began + self._after:
            return
        if not sys.stderr.isatty():
            echo(f"[{done}/{total}] {text}", err=True)
            return
        if self._bar is None:
            self._start(_bars(), total)
        self._bar.update(0, completed=done, total=total)


def _bars() -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Task, TimeRemainingColumn
    from rich.text import Text

    class Remaining(TimeRemainingColumn):
        """Time left: from the task's expected seconds if known, else from its speed."""

        max_refresh = 0.5

        def render(self, task: Task) -> Text:
            expected = task.fields.get("expected")
            if expected is None:
                return super().render(task)
            left = round(max(0.0, expected - (task.elapsed or 0.0)))
            return Text(f"about {left // 60}:{left % 60:02d}", style="progress.remaining")

    return _progress(BarColumn(), MofNCompleteColumn(), "ETA", Remaining())


def _progress(*columns: Any) -> Any:
    """Bars on stderr with a description and these columns; they disappear when they end."""
    from rich.console import Console
    from rich.progress import Progress

    return Progress("{task.description}", *columns, console=Console(stderr=True), transient=True)


class ReadingProgress(_Bar):
    """A bar for a file that is read and then processed; on a terminal only, after one second of reading.

    `close_bars` removes it.
    """

    def __init__(self, reading: str, working: str) -> None:
        super().__init__(reading)
        self._working = working

    def __call__(self, done: int, total: int) -> None:
        """Report that `done` of `total` bytes are read."""
        if quiet or not sys.stderr.isatty():
            return
        if self._bar is None:
            if done < total and time.monotonic() - self._began < 1:
                return
            close_bars()
            from rich.progress import BarColumn, TimeElapsedColumn, TimeRemainingColumn

            share = "{task.percentage:>3.0f}%"
            self._start(_progress(BarColumn(), share, TimeElapsedColumn(), "ETA", TimeRemainingColumn()), total)
            _open_bars.append(self._bar)
        if done >= total:
            self._bar.update(0, description=self._working, total=None)
        else:
            self._bar.update(0, description=self._label, total=total, completed=done)


class TransferProgress(_Bar):
    """A bar of transferred bytes with speed and ETA; on a terminal only, for transfers over two seconds."""

    def __call__(self, done: int, total: int) -> None:
        """Report that `done` of `total` bytes are transferred."""
        if quiet or not sys.stderr.isatty():
            return
        if self._bar is None:
            if time.monotonic() - self._began < 2:
                return
            from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

            moved = DownloadColumn(binary_units=True)
            self._start(_progress(BarColumn(), moved, TransferSpeedColumn(), "ETA", TimeRemainingColumn()), total)
        self._bar.update(0, completed=done, total=total)


_open_bars: list[Any] = []


def close_bars() -> None:
    """Remove the bars of `ReadingProgress` before other output is printed."""
    while _open_bars:
        _open_bars.pop().stop()


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
    import typer

    if missing:
        some = "; ".join(missing[:8]) + (f"; and {len(missing) - 8} more" if len(missing) > 8 else "")
        echo(f"llmc: not measured: {some}", err=True)
        raise typer.Exit(EXIT)
