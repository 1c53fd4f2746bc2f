"""Constraints from JSON schemas, regular expressions, choices and grammars, by llguidance.

llguidance compiles with recursion and without a bound on time, and ends the process where the stack does. So each
grammar is tried first in a child process with limits (llmc/runtime/confined); what has held there is built here, of the
same input, in a thread with a larger stack. Steps need little stack, and are bounded by llguidance's own limits
(grammars.py) and by a budget of processor time; a text that goes beyond ends with `error`, alone.
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
"""Compiled grammars to keep; a further one takes the place of the one that was not used for longest."""
MAX_GRAMMAR_BYTES = 16 << 20
"""Memory of compiled grammars to keep, as their trials took it."""
MAX_REFUSALS = 256
"""Grammars to remember as refused, so that they are not tried again."""
STACK_MARGIN = 2
"""The stack size for building a grammar here, as a multiple of the stack that was enough in the trial."""
MASK_CREDIT_S = 1.0
MASK_PER_TOKEN_S = 0.005
"""Processor time of one text's masks: this much for each token, and a credit beyond. Usual ones take 0.0002 s."""
_REMEDY = "make it smaller, or raise {variable} of the server"
_VARIABLES = {"time": "LLMC_GRAMMAR_SECONDS", "memory": "LLMC_GRAMMAR_MEMORY"}


@dataclass(frozen=True)
class _Compiled:
    matcher: Any
    size: int


class ConstraintFactory:
    """Makes constraints for texts in one model's tokens. Safe to share between threads; `acompile` on one event loop.

    `tokenizer_json` is the text of a tokenizer.json, `vocab_size` the width of the logits (ids that the tokenizer lacks
    are never allowed), `eos_token_ids` end a text that is complete, `limits` bound what a grammar may take. The
    process that trials come from starts with the first grammar, or `at_once`, while the tokenizer is read. Raises
    InputError where llguidance is not installed, ArtifactError for a tokenizer that it cannot take.
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
        """A new constraint, at the start of a text. Raises InputError, with the reason, for what cannot be followed."""
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
        """As `compile`, for an event loop: equal grammars are compiled once, and when the last of those who wait is
        cancelled, the child is killed. Raises OverloadedError where too many wait."""
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
        """What was compiled before. Raises InputError for what was refused before."""
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
        """The error for the caller, kept for the next one who asks."""
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
    """A task that several wait for; it is cancelled with the last of them."""

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
    """Characters. Those of one text are not gone through one by one: of 200,000 that holds up the event loop."""
    return len(form) if isinstance(form, str) else sum(map(len, form))


_stacks = threading.Lock()


def _on_stack(size: int, work: Callable[[], Any]) -> Future[Any]:
    """What `work` gives, in a thread with a stack of `size` bytes, of which only what is used takes memory."""
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
    """Follows one text through a compiled grammar, token by token; to be used in one thread at a time.

    Where there is no way on, the end tokens are allowed (any token, in a model without), and the constraint finishes.
    One that fails raises nothing: from then on it is `finished`, and `error` says why. Its sequence ends with
    finish_reason `error`; no other one notices.
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
        """Another one, at the same place of the text."""
        return GrammarConstraint(self._matcher.deep_copy(), self._vocab_size, self._end_ids, self._never)

    def mask(self) -> npt.NDArray[np.bool_]:
        """Which ids [V] may come next; the end tokens among them once the text is complete, or this has failed."""
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
            self._failure = "its masks take too much processor time: make the grammar less ambiguous"
        known = np.unpackbits(bits, bitorder="little").view(np.bool_)[: self._vocab_size]
        allowed = np.zeros(self._vocab_size, np.bool_)
        allowed[: known.size] = known
        allowed[self._never] = False
        return allowed

    def accept(self, token_id: int) -> None:
        """Take the token that was chosen; one that the mask forbids ends the constraint with an error."""
        try:
            self._matcher.consume_token(token_id)
        except BaseException as error:  # noqa: BLE001
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Store a panic of native code, which is not an Exception; pass on everything else."""
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise error
        self._failure = grammars.first_line(str(error)) or type(error).__name__

    @property
    def finished(self) -> bool:
        """Whether nothing but an end token may follow."""
        return self._failure is not None or bool(self._matcher.is_stopped())

    @property
    def error(self) -> str | None:
        """What stopped it before the text was complete, such as a grammar that became too complex."""
        if self._failure is not None:
            return self._failure
        return grammars.first_line(self._matcher.get_error()) if self._matcher.is_error() else None
