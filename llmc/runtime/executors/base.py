"""The contract between the engine and executors, which replay executables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from llmc.errors import InputError
from llmc.runtime.executors.compilations import CompilationCounter
from llmc.runtime.top_logits import top_of

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest import Executable
    from llmc.buckets.capture.device import GraphDevice
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.executors.slots import SlotLengths
    from llmc.runtime.step import Step
    from llmc.runtime.top_logits import TopLogits


Content = Literal["data", "code", "by first bytes"]
EXECUTABLES = "executables"
TOKEN_IDS, LENGTHS, TYPE_IDS = "token_ids", "lengths", "type_ids"
"""Encoder inputs: [B, T] int64, [B] int64 and, if the model has segment types, [B, T] int64."""


@dataclass(frozen=True)
class ExecutorDescription:
    """Facts about an executor class, known before a bundle is opened."""

    opens: Mapping[str, Content]
    """Every bundle file that the executor opens, by name (EXECUTABLES: all executables), and whether it loads the file
    as code. It calls `BundleFiles.require_native` before it loads code. artifacts/bundle/trust.py states the same
    facts, to judge bundles without an executor."""

    opens_in_thread: bool = False
    """Whether a thread may open the executor and another one run it. Opening should then be mostly native code that
    releases the interpreter lock, because the start does other work meanwhile."""

    host: Callable[[], Mapping[str, str]] = dict
    """Returns the host facts that executables compiled on their target depend on, by name (GPU, driver, compiler …), or
    nothing on a host without the device. Must be cheap. `open_executor` rejects a bundle compiled for other values.
    """


@dataclass(frozen=True)
class Capabilities:
    """How an open executor takes steps, and what its cache holds. Constant while it is open."""

    exact: bool
    """Whether any shape runs as it is. Steps are padded to a bucket otherwise."""
    ragged: bool = False
    """Whether one step takes rows of any lengths, prefill and decode together, in any slots and any order, and computes
    their live tokens only. Implies `exact`. `token_ids` is as wide as the longest row."""
    scores_each: bool = False
    """Whether the executor has `run_each`, which verifies drafted tokens."""
    prompt_chunk: int | None = None
    """The fastest prefill step size in tokens, where any shape runs. None: the larger the better."""
    most_top_k: int | None = None
    """The largest top_k of the device's sampling, which replaces a larger one and none. None: any top_k."""
    cache_tokens: int | None = None
    """KV cache size in tokens that all slots share. A slot takes its tokens rounded up to `block_tokens`, also those of
    a shared prefix. None: every slot has room for `capacity` tokens."""
    block_tokens: int = 1
    """KV cache block size in tokens."""
    cache_dtype: str = "f32"
    """The narrowest of f32, f16 and bf16 that represents the cache exactly. A KV transfer may use it."""
    in_place_of: str = ""
    """The bundle's device, if this host lacks it and the CPU runs the bundle instead; otherwise ""."""
    eager: bool = False
    """Whether steps run operator by operator, without compiled or captured graphs (`Settings.enforce_eager`)."""
    graph_device: GraphDevice | None = None
    """The device that captures graphs in the memory that they share with the KV cache. None: it captures none.

    `GraphDevice.allocate` makes the cache. `Executor.slots` then says how many sequences fit, which may differ from the
    number that the executor was opened for. Without a call, the first step makes the cache for that number. `run`
    replays the graph of a captured bucket; other buckets run without a graph."""


class Executor(ABC):
    """Replays a bundle's executables over a cache of `slots` sequences of up to `capacity` tokens each.

    The executor owns the cache, in the layout that suits its device; the engine names slots and lengths. Decode runs
    over slots 0 … n − 1, so the engine keeps live sequences in the first slots (`copy_prefix` moves one down). A cache
    may have more slots than any bucket has rows.

    Every slot keeps its tokens until a live row, a copy or an import overwrites them. Neither dummy rows nor the layout
    of a step ever change a slot, even if it holds more tokens than the step's context. A step may start below what its
    slot holds, as far as the cache allows that (`CacheShape.rewind`); the slot then ends where the step ends.
    """

    description: ClassVar[ExecutorDescription]
    capabilities: Capabilities

    def __init__(self, bundle: Bundle, slots: int, capacity: int, threads: int) -> None:
        """A subclass computes with `threads` CPU threads."""
        del threads
        self.bundle = bundle
        self.slots = slots
        self.capacity = capacity
        self.compilations = CompilationCounter()
        """Counts what the device's software reports as compiled. The executor reports everything that it opens."""
        self._logits: NDArray[np.float32] | None = None
        self._ends: NDArray[np.int64] | None = None

    @classmethod
    @abstractmethod
    def check(cls, bundle: Bundle) -> None:
        """Raise DeviceError or ArtifactError, naming the difference, if this host cannot run `bundle`."""

    @abstractmethod
    def run(self, step: Step) -> NDArray[np.float32]:
        """Append the step's new tokens to their slots and return each row's last live logits, [B, V].

        The array is the executor's buffer: valid until the next step, in its first len(step.slots) rows. Raises
        InputError for a step that the cache cannot serve.
        """

    def run_top(self, step: Step) -> TopLogits:
        """Run a step, but copy only the `Bundle.sample_top_k` largest logits of each row to the host.

        Values [B, K] float32, descending, ids [B, K] int64; ties are ordered, and kept, by lower id. Raises InputError
        if `sample_top_k` is 0.
        """
        k = self._require_top()
        return top_of(self.run(step), k)

    def run_each(self, step: Step) -> NDArray[np.float32]:
        """Run a step and return logits after every live token of the live rows, row by row: [sum of new lengths, V].

        To take back tokens, the engine starts a later step below them.
        """
        raise InputError(f"{self.bundle.path}: its graphs return logits after the last token of a row only")

    def logits(self) -> NDArray[np.float32]:
        """The logits [B, V] that `run` would have returned for the last step, also after `run_top` or `run_each`.

        Valid until the next step. Raises InputError before the first step.
        """
        if self._logits is None:
            raise InputError("no step has run yet, so there are no logits")
        return self._logits if self._ends is None else self._logits[self._ends]

    @abstractmethod
    def executable_of(self, step: Step) -> str:
        """Name of the executable that `run` would replay."""

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Make the first `length` cached tokens of slot `source` all that slot `target` holds; 0 empties it."""
        self.import_prefix(target, self.export_prefix(source, length))

    @abstractmethod
    def export_prefix(self, slot: int, length: int) -> list[NDArray[np.float32]]:
        """Copies of the first `length` cached tokens, each key and value [kv_heads, length, head_dim], in cache order.

        Of a tensor with a window only the window counts; tokens that a ring buffer dropped are 0.
        """

    @abstractmethod
    def import_prefix(self, slot: int, prefix: list[NDArray[np.float32]]) -> None:
        """Write tensors from `export_prefix`, of this or another executor of the model, to the start of slot `slot`."""

    @abstractmethod
    def nan_fill(self, slot: int, start: int, value: float) -> None:
        """Fill slot `slot` from token `start` on with `value` (NaN in verification), except earlier tokens."""

    @abstractmethod
    def memory(self) -> dict[str, int]:
        """Bytes held, by purpose (`cache`, `executables`…)."""

    @abstractmethod
    def open_all(self) -> None:
        """Open every executable before returning, so that no first use is slower."""

    def warm(self, steps: list[tuple[str, int, int, int]]) -> None:
        """Open the executables that (phase, batch, query, context) shapes need before others, the first of them now."""
        del steps

    @abstractmethod
    def close(self) -> None:
        """Release everything; the executor cannot be used afterwards."""

    def _keep(self, logits: NDArray[np.float32], each_of: Step | None = None) -> None:
        """`each_of`: the logits are those of every live token of that step."""
        self._logits = logits
        self._ends = None if each_of is None else np.cumsum(each_of.new_lengths[: len(each_of.slots)]) - 1

    def _check_step(self, step: Step, held: SlotLengths, first_slots: bool = False) -> None:
        """Raise InputError for a step that no cache of this size and with slot contents `held` can serve.

        `first_slots`: decode must run over the first slots, in order.
        """
        if len(step.slots) > step.batch or any(not 0 <= s < self.slots for s in step.slots):
            raise InputError(f"slots {step.slots} do not fit a batch of {step.batch} over {self.slots} slots")
        if len(set(step.slots)) < len(step.slots):
            raise InputError(f"slots {step.slots}: two rows of one step share a slot")
        if not ((step.new_lengths >= 1) & (step.new_lengths <= step.query)).all():
            raise InputError(f"new lengths {step.new_lengths.tolist()} are not within 1 … {step.query}")
        most = step.context if self.bundle.plan.limits.contexts else self.capacity
        if not ((step.past_lengths >= 0) & (step.past_lengths <= most)).all():
            raise InputError(f"past lengths {step.past_lengths.tolist()} are not within 0 … {most}")
        longest = max(int((step.past_lengths + step.new_lengths).max()), step.context)
        if longest > self.capacity:
            raise InputError(f"the step reaches {longest} tokens; the cache holds {self.capacity}")
        if first_slots and step.phase == "decode" and step.slots != tuple(range(len(step.slots))):
            raise InputError(f"slots {step.slots}: decode runs over the first slots, in order")
        for row, slot in enumerate(step.slots):
            held.require(slot, int(step.past_lengths[row]))

    def _check_prefix(self, prefix: list[NDArray[np.float32]], tensors: int) -> int:
        """The number of tokens to import. Recurrent state does not record its tokens, so it cannot be imported."""
        if self.bundle.cache_shape.states:
            raise InputError(f"{self.bundle.path}: its model has recurrent state, which cannot be imported")
        length = int(prefix[0].shape[1])
        if len(prefix) != tensors or length > self.capacity:
            raise InputError(f"{len(prefix)} tensors of {length} tokens do not fit {tensors} of {self.capacity} tokens")
        return length

    def _require_top(self) -> int:
        if not (k := self.bundle.sample_top_k):
            raise InputError(
                f"{self.bundle.path}: its graphs return all logits only; compile with --sample-top-k K for the largest"
            )
        return k


class StaticExecutor(Executor):
    """An executor with one executable for each step shape, opened on first use."""

    capabilities = Capabilities(exact=False)

    def executable_of(self, step: Step) -> str:
        return str(self._executable(step))

    def warm(self, steps: list[tuple[str, int, int, int]]) -> None:
        for shape in steps:
            self._open(self._find(*shape))

    def open_all(self) -> None:
        for executable in self.bundle.manifest.executables:
            self._open(executable)

    def _executable(self, step: Step) -> Executable:
        return self._find(step.phase, step.batch, step.query, step.context)

    def _find(self, phase: str, batch: int, query: int, context: int) -> Executable:
        return self.bundle.executable(phase, batch, query, context)

    @abstractmethod
    def _open(self, executable: Executable) -> Any:
        """What runs an executable, opened if need be."""
