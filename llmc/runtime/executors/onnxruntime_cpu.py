"""ONNX Runtime on CPU: GroupQueryAttention updates the cache in place, through IOBinding, with no allocation a step.

Two kinds of bundle. With one executable for all buckets (`static_dims` empty) a step runs at its exact shape on the
cache [slots, kv_heads, capacity, head_dim]. Specialised, each bucket has its own executable with fixed batch, query
and cache length context + query: the decode cache is kept at the bucket's length and laid out anew when a sequence
outgrows it; a prompt runs on a staging cache and is copied into its slots.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from llmc.errors import ArtifactError, InputError
from llmc.runtime.compilations import COMPILATIONS
from llmc.runtime.executors.base import Executor
from llmc.runtime.executors.ort_session import open_session
from llmc.runtime.host import PROMPT_CHUNK, cpu_features

if TYPE_CHECKING:
    from llmc.artifacts.manifest_schema import Executable
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.step import Step

Array = NDArray[np.float32]
_MAX_BINDINGS = 64
_BACKGROUND_NICENESS = 10


class OnnxRuntimeExecutor(Executor):
    """See the module's docstring."""

    name: ClassVar[str] = "onnxruntime"
    prompt_chunk: ClassVar[int | None] = PROMPT_CHUNK

    @classmethod
    def check(cls, bundle: Bundle) -> None:
        """Refuse a bundle made with another ONNX Runtime or for another instruction set."""
        made_with, here = bundle.manifest.toolchain.get("onnxruntime"), ort.__version__
        if made_with != here:
            raise ArtifactError(
                f"{bundle.path}: compiled with onnxruntime {made_with}, this host has {here}; "
                f"install onnxruntime=={made_with}, or compile again: {bundle.recompile_hint}"
            )
        wanted, host = set(bundle.manifest.isa), set(cpu_features())
        if wanted != host:
            differs = [f"without {f}" for f in sorted(wanted - host)] + [f"with {f}" for f in sorted(host - wanted)]
            raise ArtifactError(
                f"{bundle.path}: compiled for another instruction set; this host is {', '.join(differs)}. "
                f"Compile again here: {bundle.recompile_hint}"
            )

    def __init__(self, bundle: Bundle, slots: int, capacity: int, threads: int) -> None:
        super().__init__(bundle, slots, capacity, threads)
        model = bundle.manifest.model
        self._layers = int(model["layers"])
        self._heads, self._head_dim = int(model["kv_heads"]), int(model["head_dim"])
        self._sessions = _Sessions(bundle, threads)
        self._rows = max(slots, *(b.batch for b in bundle.plan.buckets))  # dummy rows need a place, too
        self._logits = np.empty((self._rows, int(model["vocab_size"])), np.float32)
        length = capacity if self.exact else 0
        self._cache = _Cache(2 * self._layers, self._rows, self._heads, self._head_dim, length)
        self._staging = _Cache(2 * self._layers, 1, self._heads, self._head_dim, 0)
        self._bound: dict[tuple[Any, ...], _Bound] = {}
        self._used = [0] * slots

    @property
    def exact(self) -> bool:
        """True when one executable covers every shape."""
        return not self.bundle.manifest.options.get("static_dims")

    def executable_of(self, step: Step) -> str:
        """Name of the executable in the manifest."""
        return str(self._sessions.executable(step))

    def warm(self, steps: list[tuple[str, int, int, int]]) -> None:
        """Open the first named executable now, the other named ones beside it, and the rest after the first step."""
        self._sessions.open_first(steps)

    def run(self, step: Step) -> Array:
        """One step; a prompt step of several rows over a past runs row by row, which the kernel asks for."""
        self._check_slots(step)
        past = step.past_lengths.any() if self.exact else step.context
        if step.phase == "prompt" and step.batch > 1 and past:
            return self._row_by_row(step)
        if self.exact:
            first = step.slots[0]
            if step.slots != tuple(range(first, first + step.batch)):
                raise InputError(f"slots {step.slots} are not consecutive")
            self._replay(step, self._cache, first)
        elif step.phase == "decode":
            self._cache.resize(self._used, step.context + 1)
            self._replay(step, self._cache, 0)
        else:
            self._prompt_on_staging(step)
        for row, slot in enumerate(step.slots):
            self._used[slot] = int(step.past_lengths[row] + step.new_lengths[row])
        self._sessions.open_rest()
        return self._logits

    def _row_by_row(self, step: Step) -> Array:
        rows = [slice(row, row + 1) for row in range(len(step.slots))]
        singles = [
            replace(step, slots=step.slots[r], token_ids=step.token_ids[r],
                    past_lengths=step.past_lengths[r], new_lengths=step.new_lengths[r])
            for r in rows
        ]  # fmt: skip
        logits = [self.run(single)[0].copy() for single in singles]
        self._logits[: len(rows)] = logits
        return self._logits

    def _prompt_on_staging(self, step: Step) -> None:
        length = step.context + step.query
        self._staging.reserve(step.batch, length)
        staged = self._staging.view(step.batch)
        for row, slot in enumerate(step.slots):
            past = int(step.past_lengths[row])
            if past:
                for s, c in zip(staged, self._cache.view(self._rows), strict=True):
                    s[row, :, :past] = c[slot, :, :past]
        self._replay(step, self._staging, 0)
        ends = (step.past_lengths + step.new_lengths)[: len(step.slots)]
        self._cache.resize(self._used, max(self._cache.length, int(ends.max())))
        for s, c in zip(staged, self._cache.view(self._rows), strict=True):
            for row, slot in enumerate(step.slots):
                start, end = int(step.past_lengths[row]), int(ends[row])
                c[slot, :, start:end] = s[row, :, start:end]

    def _replay(self, step: Step, cache: _Cache, first: int) -> None:
        key = (step.batch, step.query, first, cache is self._cache, cache.length, cache.generation)
        bound = self._bound.pop(key, None)
        if bound is None:
            if len(self._bound) >= _MAX_BINDINGS:
                self._bound.pop(next(iter(self._bound)))
            session = self._sessions.session(self._sessions.executable(step))
            views = [
                t[first : first + step.batch] for t in cache.view(self._rows if cache is self._cache else step.batch)
            ]
            bound = _Bound(session, step.batch, step.query, views, self._logits)
        self._bound[key] = bound
        bound.token_ids[:] = step.token_ids
        bound.past_lengths[:] = step.past_lengths
        bound.new_lengths[:] = step.new_lengths
        bound.run()

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy within the cache arrays."""
        for t in self._cache.view(self._rows):
            t[target, :, :length] = t[source, :, :length]
        self._used[target] = length

    def export_prefix(self, slot: int, length: int) -> list[Array]:
        """Copies out of the cache arrays."""
        return [t[slot, :, :length].copy() for t in self._cache.view(self._rows)]

    def import_prefix(self, slot: int, prefix: list[Array]) -> None:
        """Copies into the cache arrays, laid out anew when they are too short."""
        length = prefix[0].shape[1]
        self._cache.resize(self._used, max(self._cache.length, length))
        for t, p in zip(self._cache.view(self._rows), prefix, strict=True):
            t[slot, :, :length] = p
        self._used[slot] = length

    def poison(self, slot: int, start: int, value: float) -> None:
        """Overwrite what no live token owns, and the staging cache, into which live tokens are copied."""
        for t in self._cache.view(self._rows):
            t[slot, :, start:] = value
        self._staging.fill(value)

    def open_all(self) -> None:
        """Open every executable before returning."""
        self._sessions.open_all()

    def memory(self) -> dict[str, int]:
        """Bytes of the caches' address space, and the number of executables open."""
        return {
            "cache": self._cache.nbytes + self._staging.nbytes,
            "logits": self._logits.nbytes,
            "open_executables": self._sessions.open_count,
        }

    def close(self) -> None:
        """Drop bindings and sessions."""
        self._bound.clear()
        self._sessions.close()


class _Cache:
    """Key and value arrays of all layers: `tensors` × [slots, heads, length, head_dim], each in one buffer."""

    def __init__(self, tensors: int, slots: int, heads: int, head_dim: int, length: int) -> None:
        self._shape = (heads, head_dim)
        self.length = length
        self.slots = slots
        self.generation = 0
        self._buffers = [np.zeros(slots * heads * length * head_dim, np.float32) for _ in range(tensors)]

    @property
    def nbytes(self) -> int:
        """Bytes of address space; untouched pages take no memory."""
        return sum(b.nbytes for b in self._buffers)

    def view(self, slots: int) -> list[Array]:
        """The arrays [slots, heads, length, head_dim] over the buffers' start."""
        heads, head_dim = self._shape
        size = slots * heads * self.length * head_dim
        return [b[:size].reshape(slots, heads, self.length, head_dim) for b in self._buffers]

    def fill(self, value: float) -> None:
        """Overwrite everything."""
        for b in self._buffers:
            b.fill(value)

    def reserve(self, slots: int, length: int) -> None:
        """Take the shape [slots, heads, length, head_dim]; contents are lost."""
        heads, head_dim = self._shape
        size = slots * heads * length * head_dim
        if size > self._buffers[0].size:
            self._buffers = [np.zeros(size, np.float32) for _ in self._buffers]
            self.generation += 1
        self.slots, self.length = slots, length

    def resize(self, used: list[int], length: int) -> None:
        """Change every slot's length to `length` tokens, keeping the first used[slot] tokens of each."""
        if length == self.length:
            return
        heads, head_dim = self._shape
        kept = min(max(used), self.length, length)
        size = self.slots * heads * length * head_dim
        grown = size > self._buffers[0].size
        for i, old in enumerate(self.view(self.slots)):
            live = old[:, :, :kept].copy()
            if grown:
                self._buffers[i] = np.zeros(size, np.float32)
            self._buffers[i][:size].reshape(self.slots, heads, length, head_dim)[:, :, :kept] = live
        self.generation += grown
        self.length = length


class _Bound:
    """A session bound to fixed buffers for one batch, query and place in the cache."""

    def __init__(self, session: Any, batch: int, query: int, views: list[Array], logits: Array) -> None:
        self.token_ids = np.zeros((batch, query), np.int64)
        self.past_lengths = np.zeros(batch, np.int64)
        self.new_lengths = np.ones(batch, np.int64)
        binding = session.io_binding()
        inputs = {"token_ids": self.token_ids, "past_lengths": self.past_lengths, "new_lengths": self.new_lengths}
        for name, array in inputs.items():
            _bind(binding.bind_input, name, array)
        _bind(binding.bind_output, "logits", logits[:batch])
        for i, view in enumerate(views):
            _bind(binding.bind_input, f"past_{'kv'[i % 2]}{i // 2}", view)
            _bind(binding.bind_output, f"present_{'kv'[i % 2]}{i // 2}", view)
        self._keep = views
        self._session, self._binding = session, binding

    def run(self) -> None:
        """Replay."""
        self._session.run_with_iobinding(self._binding)


def _bind(bind: Callable[..., None], name: str, array: NDArray[Any]) -> None:
    bind(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)


class _Sessions:
    """The bundle's executables as sessions, opened when first needed, or in the background after `open_first`."""

    def __init__(self, bundle: Bundle, threads: int) -> None:
        self._bundle = bundle
        self._threads = threads
        self._any = None if bundle.manifest.options.get("static_dims") else bundle.executable("any", None, None, None)
        self._lock = threading.Lock()
        self._sessions: dict[str, Future[Any]] = {}
        self._background: ThreadPoolExecutor | None = None
        self._rest: list[Executable] = []
        self._closing = False

    @property
    def open_count(self) -> int:
        """Sessions open now."""
        return sum(f.done() for f in self._sessions.values())

    def executable(self, step: Step) -> Executable:
        """The manifest's executable for a step; raises ArtifactError when the bundle has none."""
        if self._any is not None:
            return self._any
        return self._lookup(step.phase, step.batch, step.query, step.context)

    def _lookup(self, phase: str, batch: int, query: int, context: int) -> Executable:
        if phase == "prompt" and context:
            batch = 1
        return self._bundle.executable(phase, batch, query, context)

    def session(self, executable: Executable) -> Any:
        """The session of an executable, opening it if need be."""
        with self._lock:
            future = self._sessions.get(executable.blob)
            mine = future is None
            if future is None:
                future = self._sessions[executable.blob] = Future()
        if mine:
            try:
                future.set_result(self._open(executable))
            except BaseException as e:  # noqa: BLE001 - whoever waits for the session gets it
                with self._lock:
                    del self._sessions[executable.blob]
                future.set_exception(e)
        return future.result()

    def open_first(self, shapes: list[tuple[str, int, int, int]]) -> None:
        """Open what the first shape needs, what the others need in the background, and the rest at `open_rest`."""
        if self._any is not None:
            self.session(self._any)
            return
        needed = [self._lookup(*s) for s in shapes]
        self._background = ThreadPoolExecutor(1, thread_name_prefix="llmc-open", initializer=_yield_cpu)
        for executable in needed[1:]:
            self._background.submit(self._open_quietly, executable)
        self.session(needed[0])
        self._rest = [e for e in self._bundle.manifest.executables if e not in needed]

    def open_rest(self) -> None:
        """Let the background thread open whatever `open_first` left; at once the first time, nothing later."""
        if self._rest and self._background is not None:
            for executable in self._rest:
                self._background.submit(self._open_quietly, executable)
            self._background.submit(_trim)
            self._rest = []

    def _open_quietly(self, executable: Executable) -> None:
        """In the background: whoever needs the executable gets the error, if there is one."""
        if not self._closing:
            self.session(executable)

    def _open(self, executable: Executable) -> Any:
        self._bundle.files.path("weights")  # intact, or an error that names it, before the runtime maps it
        path = str(self._bundle.files.path(executable.blob))
        if executable.state != "native":
            COMPILATIONS.record(str(executable))
        try:
            return open_session(path, self._threads)
        except Exception as e:
            raise ArtifactError(f"{self._bundle.path}: ONNX Runtime cannot open {executable}: {e}") from e

    def open_all(self) -> None:
        """Open every executable before returning; raises ArtifactError for one that cannot be opened."""
        self.open_rest()
        for executable in self._bundle.manifest.executables:
            self.session(executable)
        _trim()

    def close(self) -> None:
        """Stop opening and drop the sessions."""
        self._closing = True
        if self._background is not None:
            self._background.shutdown(wait=True, cancel_futures=True)
        self._sessions.clear()


def _yield_cpu() -> None:
    """Let steps that are being served go before the calling thread (on Linux niceness is a thread's own)."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _BACKGROUND_NICENESS)


def _trim() -> None:
    """Give memory that opening used for a moment back to the system; does nothing where the C library has no trim."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
