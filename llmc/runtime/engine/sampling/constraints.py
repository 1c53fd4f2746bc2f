"""Constraints from JSON schemas, regular expressions, choices and grammars, by llguidance.

llguidance compiles recursively and without a time limit, and a stack overflow ends the process. Each grammar is
therefore first tried in a child process with limits (llmc/runtime/confined), then built here from the same input in a
thread with a larger stack. Steps need little stack. They are bounded by llguidance's own limits (grammars.py) and by a
CPU-time budget; only the text that exceeds them ends with `error`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from llmc.errors import InputError
from llmc.runtime.confined.limits import ChildLimits
from llmc.runtime.confined.pool import ChildJob, ChildPool, LimitError
from llmc.runtime.engine.sampling import grammars
from llmc.runtime.engine.sampling.params import MAX_SOURCE, StructuredOutputsParams

MAX_GRAMMARS = 64
"""The number of compiled grammars to keep; the least recently used is dropped."""
MAX_GRAMMAR_BYTES = 16 << 20
"""Memory limit for kept grammars, as measured in their trials."""
MAX_REFUSALS = 256
"""The number of rejected grammars to remember, so that they are not tried again."""
STACK_MARGIN = 2
"""Stack size for building a grammar here, as a multiple of the stack that sufficed in its trial."""
MASK_CREDIT_S = 1.0
MASK_PER_TOKEN_S = 0.005
"""CPU time for one text's masks: this much per token plus a fixed credit. A typical mask takes 0.0002 s."""
_REMEDY = "make it smaller, or raise {variable} of the server"
_VARIABLES = {"time": "LLMC_GRAMMAR_SECONDS", "memory": "LLMC_GRAMMAR_MEMORY"}


@dataclass(frozen=True)
class _Compiled:
    matcher: Any
    size: int


class ConstraintFactory:
    """Creates constraints for one model's tokens. Thread-safe; call `acompile` on one event loop.

    `tokenizer_json` is the text of a tokenizer.json, `vocab_size` the width of the logits (ids unknown to the tokenizer
    are never allowed), `eos_token_ids` end a complete text, `limits` limit each grammar's trial. The process that forks
    trials starts with the first grammar, or `at_once` while the tokenizer is read. Raises InputError if llguidance is
    not installed, ArtifactError for an unsupported tokenizer.
    """

    def __init__(
        self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int] = (),
        limits: ChildLimits | None = None, *, at_once: bool = False,
    ) -> None:  # fmt: skip
        self._limits = limits or ChildLimits()
        options = {"tokenizer_json": tokenizer_json, "eos_token_ids": list(eos_token_ids)}
        self._pool = ChildPool(f"{grammars.__name__}:trial", options, self._limits, niceness=5)
        if at_once:
            self._pool.start()
        self._tokenizer = grammars.open_tokenizer(tokenizer_json, eos_token_ids)
        self._vocab_size = vocab_size
        self._end_ids = tuple(index for index in eos_token_ids if index < vocab_size)
        # llguidance needs an end token; without one, the id used in its place is never allowed
        self._stand_ins = () if eos_token_ids else tuple(i for i in self._tokenizer.eos_tokens if i < vocab_size)
        self._lock = threading.Lock()
        self._compiled: OrderedDict[bytes, _Compiled] = OrderedDict()
        self._refused: OrderedDict[bytes, str] = OrderedDict()
        self._pending: dict[bytes, _Shared] = {}

    def compile(self, structured: StructuredOutputsParams) -> GrammarConstraint:
        """Create a constraint at the start of a text. Raises InputError with the reason if it cannot be followed."""
        kind, form, key = _named(structured)
        found = self._found(key)
        if found is None:
            try:
                tried = self._pool.run({"kind": kind, "form": form})
                found = self._kept(key, self._built(kind, form).result(), tried)
            except InputError as error:
                raise self._refusal(kind, key, error) from None
        return self._constraint(found)

    async def acompile(self, structured: StructuredOutputsParams) -> GrammarConstraint:
        """Compile on an event loop, equal grammars once. The child is killed when the last waiter is cancelled.

        Raises what `compile` raises, and OverloadedError if too many wait.
        """
        kind, form, key = _named(structured)
        found = self._found(key)
        if found is None:
            shared = self._pending.get(key)
            if shared is None:
                shared = self._pending[key] = _Shared(asyncio.ensure_future(self._afresh(kind, form, key)))
                shared.task.add_done_callback(lambda _: self._pending.pop(key, None))
            found = await shared.result()
        return self._constraint(found)

    async def _afresh(self, kind: str, form: str | list[str], key: bytes) -> _Compiled:
        async def build(tried: ChildJob) -> _Compiled:
            return self._kept(key, await asyncio.wrap_future(self._built(kind, form)), tried)

        try:
            return await self._pool.arun({"kind": kind, "form": form}, build)
        except InputError as error:
            raise self._refusal(kind, key, error) from None

    def close(self) -> None:
        """End the child processes."""
        self._pool.close()

    def _found(self, key: bytes) -> _Compiled | None:
        """A previously compiled grammar. Raises InputError for one that was rejected before."""
        with self._lock:
            if key in self._refused:
                self._refused.move_to_end(key)
                raise InputError(self._refused[key])
            if key in self._compiled:
                self._compiled.move_to_end(key)
            return self._compiled.get(key)

    def _kept(self, key: bytes, matcher: Any, tried: ChildJob) -> _Compiled:
        built = _Compiled(matcher, tried.size)
        with self._lock:
            self._compiled[key] = built
            self._compiled.move_to_end(key)
            while len(self._compiled) > 1 and (
                len(self._compiled) > MAX_GRAMMARS
                or sum(one.size for one in self._compiled.values()) > MAX_GRAMMAR_BYTES
            ):
                self._compiled.popitem(last=False)
        return built

    def _refusal(self, kind: str, key: bytes, error: InputError) -> InputError:
        """The error for the caller, cached for later requests."""
        reason = str(error)
        if isinstance(error, LimitError):
            variable = _VARIABLES.get(error.limit)
            reason += "; " + (_REMEDY.format(variable=variable) if variable else "make it flatter")
        message = f"structured_outputs.{kind} cannot be followed: {reason}"
        with self._lock:
            self._refused[key] = message
            while len(self._refused) > MAX_REFUSALS:
                self._refused.popitem(last=False)
        return InputError(message)

    def _built(self, kind: str, form: str | list[str]) -> Future[Any]:
        stack = STACK_MARGIN * self._limits.stack_bytes
        return _on_stack(stack, lambda: grammars.build(self._tokenizer, kind, form))

    def _constraint(self, compiled: _Compiled) -> GrammarConstraint:
        with self._lock:  # a matcher may not be used by two threads, not even to copy it
            matcher = compiled.matcher.deep_copy()
        return GrammarConstraint(matcher, self._vocab_size, self._end_ids, self._stand_ins)


class _Shared:
    """A task with several waiters; it is cancelled with the last of them."""

    def __init__(self, task: asyncio.Task[_Compiled]) -> None:
        self.task = task
        self._waiting = 0

    async def result(self) -> _Compiled:
        self._waiting += 1
        try:
            return await asyncio.shield(self.task)
        finally:
            self._waiting -= 1
            if not self._waiting:
                self.task.cancel()


def _named(structured: StructuredOutputsParams) -> tuple[str, str | list[str], bytes]:
    """Kind, form and digest. Raises InputError for a form that is too long."""
    kind = structured.kind
    value: Any = getattr(structured, kind)
    form: str | list[str] = list(value) if kind == "choice" else "" if kind == "json_object" else str(value)
    length = _length(form)
    if length > MAX_SOURCE:
        raise InputError(
            f"structured_outputs.{kind} has {length} characters; at most {MAX_SOURCE} are taken: make it smaller"
        )
    return kind, form, hashlib.sha256(json.dumps([kind, form]).encode()).digest()


def _length(form: str | list[str]) -> int:
    """Number of characters. A single text is not iterated: 200,000 characters would block the event loop."""
    return len(form) if isinstance(form, str) else sum(map(len, form))


_stacks = threading.Lock()


def _on_stack(size: int, work: Callable[[], Any]) -> Future[Any]:
    """Run `work` in a thread with a stack of `size` bytes, of which only the used part takes memory."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - whoever waits gets it; native code's panics are no Exceptions
            future.set_exception(error if isinstance(error, Exception) else InputError(str(error)[:300]))

    future.set_running_or_notify_cancel()
    with _stacks:
        before = threading.stack_size(size)
        try:
            threading.Thread(target=run, name="llmc-grammar", daemon=True).start()
        finally:
            threading.stack_size(before)
    return future


class GrammarConstraint:
    """Follows one text through a compiled grammar, token by token. Not thread-safe.

    At a dead end, end tokens are allowed (any token, in a model without) and the constraint finishes. A failed
    constraint raises nothing: it is `finished`, and `error` says why. Its sequence ends with finish_reason `error`;
    others continue.
    """

    def __init__(self, matcher: Any, vocab_size: int, end_ids: Sequence[int], never: Sequence[int] = ()) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._end_ids = tuple(end_ids)
        self._never = list(never)
        self._otherwise = list(end_ids) or slice(None)
        self._credit_s = MASK_CREDIT_S
        self._failure: str | None = None

    def copy(self) -> GrammarConstraint:
        """A copy at the same position of the text."""
        return GrammarConstraint(self._matcher.deep_copy(), self._vocab_size, self._end_ids, self._never)

    def mask(self) -> npt.NDArray[np.bool_]:
        """Which ids [V] may come next, including end tokens once the text is complete or this has failed."""
        allowed = self._mask() if self._failure is None else np.zeros(self._vocab_size, np.bool_)
        if not allowed.any():
            allowed[self._otherwise] = True
        return allowed

    def _mask(self) -> npt.NDArray[np.bool_]:
        began = time.thread_time()
        try:
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        except BaseException as error:  # noqa: BLE001
            self._fail(error)
            return np.zeros(self._vocab_size, np.bool_)
        self._credit_s += MASK_PER_TOKEN_S - (time.thread_time() - began)
        if self._credit_s < 0:
            self._failure = "its masks take too much CPU time: make the grammar less ambiguous"
        known = np.unpackbits(bits, bitorder="little").view(np.bool_)[: self._vocab_size]
        allowed = np.zeros(self._vocab_size, np.bool_)
        allowed[: known.size] = known
        allowed[self._never] = False
        return allowed

    def accept(self, token_id: int) -> None:
        """Take the chosen token; one that the mask forbids ends the constraint with an error."""
        try:
            self._matcher.consume_token(token_id)
        except BaseException as error:  # noqa: BLE001
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Store a panic of native code, which is not an Exception; re-raise everything else."""
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise error
        self._failure = grammars.first_line(str(error)) or type(error).__name__

    @property
    def finished(self) -> bool:
        """Whether only an end token may follow."""
        return self._failure is not None or bool(self._matcher.is_stopped())

    @property
    def error(self) -> str | None:
        """Why it stopped before the text was complete, for example because a grammar became too complex."""
        if self._failure is not None:
            return self._failure
        return grammars.first_line(self._matcher.get_error()) if self._matcher.is_error() else None
