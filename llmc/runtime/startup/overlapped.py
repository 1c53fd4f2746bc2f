"""From a bundle to its first token in the least time: the executor opens in a thread beside the interpreter.

Opening the first executable is native code that leaves the interpreter free, and takes about as long as everything
that Python does on the way to the first token: importing the engine, reading the tokenizer, compiling the chat
template. So the thread starts as early as it can, and modules that are imported before it (this one, llm.py, bundle.py
and what they need) import nothing of the engine.
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
    """An executor of `bundle` that is being opened, together with the executables of its first steps.

    An executor that must be opened by the thread that runs it is open before this returns. Ask for the `executor`, or
    `abandon` it; what goes wrong in the thread is raised there. Raises ArtifactError or DeviceError.
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
        """The executor, when it is open."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._executor is not None
        return self._executor

    def abandon(self) -> None:
        """Close what was opened, whenever it is."""
        if self._thread is not None:
            self._thread.join()
        if self._executor is not None:
            self._executor.close()

    def _open_quietly(self) -> None:
        try:
            self._executor = self._open()
        except BaseException as e:  # noqa: BLE001 - whoever asks for the executor gets it
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
    """What the class of its executor says; its module is imported here, where no other thread imports beside it."""
    try:
        return executor_class(bundle.manifest.executor).description.opens_in_thread
    except UnknownNameError:
        return False  # opening it raises an error that says what to do
