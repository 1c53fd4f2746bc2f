"""Minimize cold-start TTFT: open the executor in a thread while Python starts the engine.

Opening the first executable is native code that releases the interpreter. It takes about as long as the rest of
startup: importing the engine, reading the tokenizer, compiling the chat template. The thread therefore starts as early
as possible, and modules imported before it (this one, llm.py, bundle.py and their imports) import nothing of the
engine.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from llmc.errors import UnknownNameError
from llmc.runtime.executors import executor_class
from llmc.runtime.startup.opening import EngineOptions, open_executor

if TYPE_CHECKING:
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.executors.base import Executor


class StartingExecutor:
    """An executor of `bundle` that is being opened, with the executables of its first steps.

    An executor that must be opened by its own thread is open when the constructor returns. Read `executor` or call
    `abandon`; errors of the thread are raised there. Raises ArtifactError or DeviceError.
    """

    def __init__(self, bundle: Bundle, options: EngineOptions) -> None:
        self.bundle = bundle
        self.options = options
        self._executor: Executor | None = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if opens_in_thread(bundle):
            self._thread = threading.Thread(target=self._open_quietly, name="llmc-start")
            self._thread.start()
        else:
            self._executor = self._open()

    @property
    def executor(self) -> Executor:
        """Wait for the executor and return it."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._executor is not None
        return self._executor

    def abandon(self) -> None:
        """Close whatever was or will be opened."""
        if self._thread is not None:
            self._thread.join()
        if self._executor is not None:
            self._executor.close()

    def _open_quietly(self) -> None:
        try:
            self._executor = self._open()
        except BaseException as e:  # noqa: BLE001 - raised when the executor is read
            self._error = e

    def _open(self) -> Executor:
        executor = open_executor(self.bundle, self.options)
        try:
            plan = self.bundle.plan
            first = min(plan.prompt, key=lambda b: (b.tokens, b.context))
            decode = plan.lookup("decode", 1, 1, first.query)
            shapes = [first] + ([decode] if decode else [])
            executor.warm([(b.phase, b.batch, b.query, b.context) for b in shapes])
        except BaseException:
            executor.close()
            raise
        return executor


def opens_in_thread(bundle: Bundle) -> bool:
    """Whether the executor's class allows opening in a thread.

    Imports the class's module here, because no other thread imports at this time.
    """
    try:
        return executor_class(bundle.manifest.executor).description.opens_in_thread
    except UnknownNameError:
        return False  # opening it raises an error with instructions
