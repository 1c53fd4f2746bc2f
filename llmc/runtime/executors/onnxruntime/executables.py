"""A bundle's ONNX executables as sessions, executors over them, and the storage formats of keys and values."""

from __future__ import annotations

import os
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmc.artifacts.bundle.kernel_sets import KERNEL_SETS, sets_in
from llmc.errors import ArtifactError
from llmc.runtime.bfloat16 import from_bfloat16, to_bfloat16
from llmc.runtime.cache_shape import SCALE_BYTES, CacheShape
from llmc.runtime.executors.base import EXECUTABLES, ExecutorDescription
from llmc.runtime.executors.compatibility import kernels_here, require_mappable
from llmc.runtime.executors.onnxruntime.session import Team, open_session, session_monitor
from llmc.runtime.executors.slot_cache import SlotCacheExecutor, TensorPart, Tensors
from llmc.runtime.heap import trim
from llmc.runtime.step import ADAPTERS
from llmc.runtime.top_logits import TopLogits

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest import Executable
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.cache_shape import CacheTensor
    from llmc.runtime.executors.compilations import CompilationCounter
    from llmc.runtime.step import Step, StepPart


_LARGEST, _LEAST = np.float32(127), np.float32(1e-30)
_SIGN, _INFINITE, _NOT_A_NUMBER = 0x8000, 0x7F80, 0x7FC0
"""Bits of bfloat16."""


def encoded(numbers: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Quantize values [.., width] to lines [.., width + SCALE_BYTES]. A line with a non-finite value decodes to NaN.

    In the format of llmc's attention (kernels/source/cache_lines.h), a line holds one head's key or value of a token:
    int8 [width] quantized values, and their scale, the first half of a float32 (bfloat16). The largest quantized value
    is 127, so decoding and encoding again is bitwise stable.
    """
    finite = np.isfinite(numbers).all(-1, keepdims=True)
    numbers = np.where(finite, numbers, 0).astype(np.float32)
    held = to_bfloat16(np.abs(numbers).max(-1, keepdims=True) / _LARGEST)
    scales = from_bfloat16(held)
    kept = scales >= _LEAST
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=kept)
    quantized = np.rint(numbers * inverse).astype(np.int8).view(np.uint8)
    held = np.where(finite, np.where(kept, held, 0), _NOT_A_NUMBER)
    return np.concatenate([quantized, held.astype("<u2").view(np.uint8)], -1)


def decoded(lines: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantize lines to values [.., width]."""
    quantized = np.ascontiguousarray(lines[..., :-SCALE_BYTES]).view(np.int8)
    scales = from_bfloat16(np.ascontiguousarray(lines[..., -SCALE_BYTES:]).view("<u2"))
    return quantized.astype(np.float32) * scales


class CodedTensors(Tensors):
    """Keys and values in 8 bits."""

    def numbers(self, held: NDArray[Any]) -> NDArray[np.float32]:
        return decoded(held)

    def held(self, numbers: NDArray[np.float32]) -> NDArray[Any]:
        return encoded(numbers)

    def filling(self, part: TensorPart, value: float) -> NDArray[Any]:
        return encoded(np.full(part.like.shape[1] - SCALE_BYTES, value, np.float32))


def rounded(numbers: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of each value in a bfloat16 cache, in the format of llmc's attention (kernels/source/cache_lines.h).

    Values below 2⁻¹²⁶ are zero. There are no infinities, because attention could silently ignore them.
    """
    bits = to_bfloat16(numbers)
    size = bits & ~np.uint16(_SIGN)
    bits[size < 0x80] &= _SIGN
    bits[size >= _INFINITE] = _NOT_A_NUMBER
    return bits


class RoundedTensors(Tensors):
    """Keys and values in bfloat16."""

    def numbers(self, held: NDArray[Any]) -> NDArray[np.float32]:
        return from_bfloat16(held)

    def held(self, numbers: NDArray[np.float32]) -> NDArray[Any]:
        return rounded(numbers)

    def filling(self, part: TensorPart, value: float) -> NDArray[Any]:
        return rounded(np.full(1, value, np.float32))


class CacheFormat(NamedTuple):
    """A storage format: array dtype, ONNX Runtime's name of it, the class that stores it, extra elements per line, and
    the narrowest dtype that represents its values exactly.
    """

    dtype: type
    onnx_type: str
    tensors: type[Tensors] = Tensors
    beside: int = 0
    exact: str = "f32"


FLOATS = CacheFormat(np.float32, "tensor(float)")
FORMATS = {
    "f16": CacheFormat(np.float16, "tensor(float16)", exact="f16"),
    "bf16": CacheFormat(np.uint16, "tensor(uint16)", RoundedTensors, exact="bf16"),
    "int8": CacheFormat(np.uint8, "tensor(uint8)", CodedTensors, SCALE_BYTES),
}


def format_of(bundle: Bundle) -> CacheFormat:
    """The format of a bundle's graphs; float32 if its manifest names none."""
    return FORMATS.get(str(bundle.manifest.options.get("kv_cache_dtype")), FLOATS)


def lines_of(bundle: Bundle) -> CacheShape:
    """A bundle's cache shape with keys and values as wide as lines."""
    shape, beside = bundle.cache_shape, format_of(bundle).beside
    if not beside:
        return shape
    wide = (replace(t, shape=(t.shape[0], t.shape[1] + beside)) if t.kind == "kv" else t for t in shape)
    return CacheShape(shape.layers, tuple(wide))


LOGIT_ROWS = "logit_rows"
"""Graph input that selects the tokens whose logits are returned (llmc/compiler/targets/onnxruntime/to_onnx.py)."""

Results = dict[str, NDArray[Any]]
_BACKGROUND_NICENESS = 10


class Executables:
    """The bundle's executables as sessions, opened on first use, or in the background after `open_first`."""

    def __init__(self, bundle: Bundle, threads: int, compilations: CompilationCounter) -> None:
        self._bundle = bundle
        self._compilations = compilations
        self._threads = threads
        self._any = None if bundle.manifest.options.get("static_dims") else bundle.executable("any", None, None, None)
        self._lock = threading.Lock()
        self._sessions: dict[str, Future[Any]] = {}
        self._team: Team | None = None
        self._background: ThreadPoolExecutor | None = None
        self._rest: list[Executable] = []
        self._closing = False

    @property
    def open_count(self) -> int:
        return sum(f.done() for f in self._sessions.values())

    def executable(self, step: Step) -> Executable:
        """The manifest's executable for a step. Raises ArtifactError."""
        if self._any is not None:
            return self._any
        return self._lookup(step.phase, step.batch, step.query, step.context)

    def _lookup(self, phase: str, batch: int, query: int, context: int) -> Executable:
        if phase == "prompt" and context:
            batch = 1
        return self._bundle.executable(phase, batch, query, context)

    def session(self, executable: Executable) -> Any:
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
        """Open what the first shape needs now, what the others need in the background, and the rest at `open_rest`."""
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
        """Let the background thread open what `open_first` left. Only the first call has an effect."""
        if self._rest and self._background is not None:
            for executable in self._rest:
                self._background.submit(self._open_quietly, executable)
            self._background.submit(trim)
            self._rest = []

    def _open_quietly(self, executable: Executable) -> None:
        if not self._closing:
            self.session(executable)

    def _open(self, executable: Executable) -> Any:
        self._bundle.files.path("weights")  # verified before the runtime maps it
        path = str(self._bundle.files.path(executable.blob))
        library = None
        if sets_in(self._bundle.manifest.files):
            file = kernels_here(self._bundle).file
            self._bundle.files.require_native(file)
            found = self._bundle.files.path(file)
            require_mappable(self._bundle, found)
            library = str(found)
        if executable.state != "native":
            self._compilations.record(str(executable))
        else:
            self._compilations.loaded(str(executable))
        try:
            session = open_session(path, self._threads, library=library)
        except Exception as e:
            raise ArtifactError(f"{self._bundle.path}: ONNX Runtime cannot open {executable}: {e}") from e
        self._require_agreement(session, str(executable))
        if LOGIT_ROWS not in {given.name for given in session.get_inputs()}:
            raise ArtifactError(
                f"{self._bundle.path}: {executable} was compiled by an earlier llmc, whose graphs had other inputs; "
                f"compile again: {self._bundle.recompile_hint}"
            )
        if library is not None:
            with self._lock:
                self._team = self._team or Team(library, self._threads)
        return session

    def _require_agreement(self, session: Any, name: str) -> None:
        """Raise ArtifactError if a graph's caches or logits do not have the manifest's sizes and types."""
        bundle, kv_type = self._bundle, format_of(self._bundle).onnx_type

        def fits(info: Any, t: CacheTensor) -> bool:
            shape = tuple(info.shape[1:])
            if t.kind != "kv":
                return shape == t.shape and info.type == FLOATS.onnx_type
            return shape[:1] + shape[2:] == t.shape and info.type == kv_type

        given = {i.name.removeprefix("past_"): i for i in session.get_inputs() if i.name.startswith("past_")}
        given.pop("lengths", None)
        logits = [built.shape[-1] for built in session.get_outputs() if built.name == "logits"]
        tensors = {t.entry: t for t in lines_of(bundle)}
        agrees = given.keys() == tensors.keys() and all(fits(info, tensors[entry]) for entry, info in given.items())
        agrees &= (ADAPTERS in {i.name for i in session.get_inputs()}) == bool(bundle.adapters)
        if not agrees or logits != [bundle.size("vocab_size")]:
            raise ArtifactError(
                f"{bundle.path}: {name} is not a graph of the sizes that the manifest states; compile again: "
                f"{bundle.recompile_hint}"
            )

    def open_all(self) -> None:
        """Open every executable before returning. Raises ArtifactError."""
        self.open_rest()
        for executable in self._bundle.manifest.executables:
            self.session(executable)
        trim()

    def close(self) -> None:
        self._closing = True
        if self._background is not None:
            self._background.shutdown(wait=True, cancel_futures=True)
        self._sessions.clear()
        if self._team is not None:
            self._team.close()
            self._team = None


class OnnxExecutor(SlotCacheExecutor):
    """Common part of ONNX executors; `_run_part` takes a step that one graph can run."""

    description: ClassVar[ExecutorDescription] = ExecutorDescription(
        {"weights": "data", EXECUTABLES: "data", **dict.fromkeys((s.file for s in KERNEL_SETS), "code")},
        opens_in_thread=True,
    )
    _results: Results

    def __init__(self, bundle: Bundle, slots: int, capacity: int, threads: int) -> None:
        super().__init__(bundle, slots, capacity, threads)
        self.compilations.monitors.append(session_monitor())
        self._executables = Executables(bundle, threads, self.compilations)
        self._results = {}

    def executable_of(self, step: Step) -> str:
        return str(self._executables.executable(step))

    def warm(self, steps: list[tuple[str, int, int, int]]) -> None:
        """Open the first executable now, the other named ones in parallel, and the rest after the first step."""
        self._executables.open_first(steps)

    def open_all(self) -> None:
        self._executables.open_all()

    def run(self, step: Step) -> NDArray[np.float32]:
        self._run(step)
        return self.logits()

    def run_top(self, step: Step) -> TopLogits:
        """The graph's TopK orders ties by lower id."""
        self._require_top()
        self._run(step)
        return TopLogits(self._results["top_values"], self._results["top_ids"])

    def run_each(self, step: Step) -> NDArray[np.float32]:
        if not self.capabilities.scores_each:
            return super().run_each(step)
        self._run(step, each=True)
        return self._results["logits"][: step.live_tokens]

    def memory(self) -> dict[str, int]:
        """A slot counts with its longest content so far, the decode and prompt layouts with their largest."""
        return {
            "cache": self._cache.nbytes + self._staging.nbytes,
            "logits": sum(array.nbytes for array in self._results.values()),
            "open_executables": self._executables.open_count,
        }

    def close(self) -> None:
        self._executables.close()

    def _run(self, step: Step, each: bool = False) -> None:
        """Run a step, in parts if necessary; results for its rows, or `each` live token, are in `_results`."""
        self._require(step)
        parts = list(self._parts(step))
        if len(parts) == 1:
            self._run_part(parts[0][0], each)
        else:
            self._run_parts(step, parts, each)
        self._keep(self._results["logits"], each_of=step if each else None)

    @abstractmethod
    def _require(self, step: Step) -> None:
        """Raise InputError for a step that the cache cannot serve."""

    @abstractmethod
    def _parts(self, step: Step) -> Iterator[StepPart]:
        """What a step takes, one after the other."""

    @abstractmethod
    def _run_part(self, step: Step, each: bool) -> None:
        """Run a part, over the cache; what graphs return is in `_results`."""

    def _run_parts(self, step: Step, parts: Sequence[StepPart], each: bool) -> None:
        built: list[list[Results]] = [[] for _ in step.slots]
        for part, rows in parts:
            self._run_part(part, each)
            ends = np.cumsum(part.new_lengths if each else np.ones(len(rows), np.int64)).tolist()
            for row, start, end in zip(rows.tolist(), [0, *ends], ends, strict=False):
                kept = {name: array[start:end].copy() for name, array in self._results.items()}
                built[row] = [*built[row], kept] if each else [kept]
        whole = [kept for row in built for kept in row]
        self._reserve(sum(len(kept["logits"]) for kept in whole))
        for name, array in self._results.items():
            np.concatenate([kept[name] for kept in whole], out=array[: sum(len(kept[name]) for kept in whole)])

    def _reserve(self, rows: int) -> None:
        """Make room in `_results` for so many rows of logits, and for those of all slots."""
        if len(self._results.get("logits", ())) < rows:
            rows = max(rows, self.slots)
            self._results = {"logits": np.zeros((rows, self.bundle.size("vocab_size")), np.float32)}
            if k := self.bundle.sample_top_k:
                self._results["top_values"] = np.zeros((rows, k), np.float32)
                self._results["top_ids"] = np.zeros((rows, k), np.int64)


class BoundSession:
    """A session bound to its cache: where it reads and writes each tensor, by entry. One array is both if in place."""

    def __init__(self, session: Any, cache: Mapping[str, tuple[NDArray[Any], NDArray[Any]]]) -> None:
        self._session = session
        self._binding = session.io_binding()
        self._cache = cache
        self._names = {given.name for given in session.get_inputs()}
        self._inputs: dict[str, NDArray[np.int64]] = {}
        self._bound: dict[str, tuple[int, int]] = {}
        for entry, (past, present) in cache.items():
            _bind(self._binding.bind_input, f"past_{entry}", past)
            _bind(self._binding.bind_output, f"present_{entry}", present)

    def run(self, inputs: Mapping[str, NDArray[np.int64]], results: Mapping[str, NDArray[Any]]) -> None:
        """Replay with those of `inputs` that the graph has; the first rows of `results` receive LOGIT_ROWS' results."""
        for name, given in inputs.items():
            if name not in self._names:
                continue
            held = self._inputs.get(name)
            if held is None or held.shape != given.shape:
                held = self._inputs[name] = np.empty(given.shape, np.int64)
                _bind(self._binding.bind_input, name, held)
            held[:] = given
        count = len(inputs[LOGIT_ROWS])
        for name, array in results.items():
            if self._bound.get(name) != (array.ctypes.data, count):
                _bind(self._binding.bind_output, name, array[:count])
                self._bound[name] = (array.ctypes.data, count)
        self._session.run_with_iobinding(self._binding)


def _bind(bind: Callable[..., None], name: str, array: NDArray[Any]) -> None:
    """Bind an input or output of a session to a contiguous array, which must outlive the binding."""
    bind(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)


def _yield_cpu() -> None:
    """Lower the calling thread's priority below serving steps (on Linux, niceness is per thread)."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _BACKGROUND_NICENESS)
