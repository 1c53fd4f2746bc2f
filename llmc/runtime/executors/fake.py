"""numpy as a device: replays what the fake target compiles, and holds the engine to the contract of an executor.

The model and the format of an executable are in llmc/compiler/targets/fake.py. A specialised executable computes at
its full static shape, padding and unused cache included, and masks what no live token owns, as compiled graphs do; so
a mask that is wrong, a wrong slot or a wrong past changes results here too. Whatever a real device would silently get
wrong is refused: another shape than the compiled one, a past that the slot does not hold, tokens beyond the cache.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from llmc.errors import ArtifactError, InputError
from llmc.runtime.compilations import COMPILATIONS
from llmc.runtime.executors.base import Executor
from llmc.runtime.executors.top import top_of

if TYPE_CHECKING:
    from pathlib import Path

    from llmc.artifacts.manifest_schema import Executable
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.sampling.top import TopLogits
    from llmc.runtime.step import Step

Array = NDArray[np.float32]
Ints = NDArray[np.int64]

FAKE_VERSION = "1.0"
"""Version of the fake device's toolchain: a bundle runs on the very version that it was compiled with."""

FORMAT = 1
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class FakeExecutor(Executor):
    """See the module's docstring. The cache is one array [slots, capacity, hidden_size]: the model has no keys."""

    name: ClassVar[str] = "fake"

    @classmethod
    def check(cls, bundle: Bundle) -> None:
        """Refuse a bundle that was compiled with another version of the fake device."""
        made_with = bundle.manifest.toolchain.get("fake")
        if made_with != FAKE_VERSION:
            raise ArtifactError(
                f"{bundle.path}: compiled with the fake device {made_with}, this host has {FAKE_VERSION}; "
                f"compile again: {bundle.recompile_hint}"
            )

    def __init__(self, bundle: Bundle, slots: int, capacity: int, threads: int) -> None:
        super().__init__(bundle, slots, capacity, threads)
        model = bundle.manifest.model
        self._cache: Array = np.zeros((slots, capacity, int(model["kv_heads"]) * int(model["head_dim"])), np.float32)
        self._used = [0] * slots
        widest = max(slots, *(b.batch for b in bundle.plan.buckets))
        self._logits: Array = np.zeros((widest, int(model["vocab_size"])), np.float32)
        self._programs: dict[str, Program] = {}
        self._last: Program | None = None

    @property
    def exact(self) -> bool:
        """True when one executable covers every shape."""
        return not self.bundle.manifest.options.get("static_dims")

    def executable_of(self, step: Step) -> str:
        """Name of the executable in the manifest."""
        return str(self._find(step.phase, step.batch, step.query, step.context))

    def warm(self, steps: list[tuple[str, int, int, int]]) -> None:
        """Open the named executables; the others open when first needed, in microseconds."""
        for shape in steps:
            self._open(self._find(*shape))

    def run(self, step: Step) -> Array:
        """One step at the executable's shape; rows without a request come back as NaN, since nobody may use them."""
        self._check_past(step)
        program = self._open(self._find(step.phase, step.batch, step.query, step.context))
        past = np.zeros((step.batch, step.context, self._cache.shape[2]), np.float32)
        for row, slot in enumerate(step.slots):
            past[row] = self._cache[slot, : step.context]
        logits, new = program.replay(step.token_ids, step.past_lengths, step.new_lengths, past)
        for row, slot in enumerate(step.slots):
            start, count = int(step.past_lengths[row]), int(step.new_lengths[row])
            self._cache[slot, start : start + count] = new[row, :count]
            self._used[slot] = start + count
        self._logits.fill(np.nan)
        self._logits[: len(step.slots)] = logits[: len(step.slots)]
        self._last = program
        return self._logits[: step.batch]

    def run_top(self, step: Step) -> TopLogits:
        """As `run`; what the executable was compiled to return."""
        self._require_top()
        logits = self.run(step)
        assert self._last is not None
        return top_of(logits, self._last.top_k)

    def logits(self) -> Array:
        """What the last step left in the buffer."""
        if self._last is None:
            raise InputError("no step has run yet, so there are no logits")
        return self._logits

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy within the cache array."""
        self._require_held(source, length)
        self._cache[target, :length] = self._cache[source, :length]
        self._used[target] = length

    def export_prefix(self, slot: int, length: int) -> list[Array]:
        """A copy of the token vectors, [1, length, hidden_size]; they are all that this model remembers."""
        self._require_held(slot, length)
        return [self._cache[slot, :length].copy()[None]]

    def import_prefix(self, slot: int, prefix: list[Array]) -> None:
        """Copy token vectors into the cache array."""
        vectors = prefix[0][0]
        self._cache[slot, : len(vectors)] = vectors
        self._used[slot] = len(vectors)

    def poison(self, slot: int, start: int, value: float) -> None:
        """Overwrite what no live token owns."""
        self._cache[slot, start:] = value

    def open_all(self) -> None:
        """Every executable is open from the start."""

    def memory(self) -> dict[str, int]:
        """Bytes of cache and logits, and the number of executables open; weights are mapped, not held."""
        return {
            "cache": self._cache.nbytes,
            "logits": self._logits.nbytes,
            "open_executables": len(self._programs),
        }

    def close(self) -> None:
        """Drop executables and with them the mapped weights."""
        self._programs.clear()
        self._last = None

    def _find(self, phase: str, batch: int, query: int, context: int) -> Executable:
        """The manifest's executable for a shape; raises ArtifactError when the bundle has none."""
        return self.bundle.executable(*(("any", None, None, None) if self.exact else (phase, batch, query, context)))

    def _open(self, executable: Executable) -> Program:
        """The executable, read and verified when it is used first."""
        program = self._programs.get(executable.blob)
        if program is None:
            try:
                fields = json.loads(self.bundle.files.read(executable.blob))
                weights = self.bundle.files.path(fields["weights"])
                program = Program.load(fields, weights)
                if program.top_k != self.top_k:
                    raise ValueError(f"it returns {program.top_k} top logits, the bundle's {self.top_k}")
            except (KeyError, TypeError, ValueError) as e:
                raise ArtifactError(
                    f"{self.bundle.path}: {executable} is not an executable of the fake device ({e}); "
                    f"compile again: {self.bundle.recompile_hint}"
                ) from e
            if executable.state != "native":
                COMPILATIONS.record(str(executable))
            self._programs[executable.blob] = program
        return program

    def _check_past(self, step: Step) -> None:
        """Raise InputError for a step that no cache of this size and content can serve."""
        longest = step.context + step.query
        if longest > self.capacity:
            raise InputError(
                f"past and query of a {step.phase} step take {longest} tokens; the cache holds {self.capacity}"
            )
        self._check_step(step)
        if step.phase == "decode" and step.slots != tuple(range(len(step.slots))):
            raise InputError(f"slots {step.slots}: decode runs over the first slots, in order")
        for row, slot in enumerate(step.slots):
            self._require_held(slot, int(step.past_lengths[row]))

    def _require_held(self, slot: int, length: int) -> None:
        if length > self._used[slot]:
            raise InputError(f"slot {slot} holds {self._used[slot]} tokens, not {length}")


@dataclass(frozen=True)
class Program:
    """An opened executable: its sizes (None: dynamic), its constants, and its tensors [V, H], mapped read-only."""

    batch: int | None
    query: int | None
    context: int | None
    decay: float
    positions: int
    embedding: Array
    head: Array
    top_k: int = 0

    @classmethod
    def load(cls, fields: dict[str, Any], weights: Path) -> Program:
        """From an executable's JSON and the weights file. Raises KeyError, TypeError or ValueError if malformed."""
        if fields["format"] != FORMAT:
            raise ValueError(f"format {fields['format']}, not {FORMAT}")
        tensors = {
            name: np.memmap(weights, np.float32, "r", tensor["offset"], tuple(tensor["shape"]))
            for name, tensor in fields["tensors"].items()
        }
        return cls(
            fields["batch"], fields["query"], fields["context"], float(fields["decay"]), int(fields["positions"]),
            tensors[EMBEDDING], tensors[HEAD], int(fields.get("sample_top_k", 0)),
        )  # fmt: skip

    def replay(self, token_ids: Ints, past_lengths: Ints, new_lengths: Ints, past: Array) -> tuple[Array, Array]:
        """Logits after each row's last live token, [B, V], and the vectors of the new tokens, [B, Q, H].

        token_ids [B, Q], past_lengths [B], new_lengths [B], past [B, context, H]. Raises ArtifactError for sizes other
        than the compiled ones. Sums are float64, so that padding does not change a row's last digits.
        """
        self._require_shape((*token_ids.shape, past.shape[1]))
        new_at, past_at = np.arange(token_ids.shape[1]), np.arange(past.shape[1])
        scale = 1 + (past_lengths[:, None] + new_at) / self.positions
        new = (scale[..., None] * self.embedding[token_ids]).astype(np.float32)
        last = past_lengths + new_lengths - 1
        state = _faded(new, new_at < new_lengths[:, None], new_lengths[:, None] - 1 - new_at, self.decay)
        state += _faded(past, past_at < past_lengths[:, None], last[:, None] - past_at, self.decay)
        return (state @ self.head.T.astype(np.float64)).astype(np.float32), new

    def _require_shape(self, given: tuple[int, ...]) -> None:
        compiled = (self.batch, self.query, self.context)
        if any(fixed not in (None, size) for fixed, size in zip(compiled, given, strict=True)):
            raise ArtifactError(
                f"an executable compiled for batch, query, context {compiled} was given {given}; compile again"
            )


def _faded(vectors: Array, live: NDArray[np.bool_], age: Ints, decay: float) -> NDArray[np.float64]:
    """Σ decay^age · vector over the live tokens of each row, [B, H]; `vectors` [B, n, H], `live` and `age` [B, n].

    What is not live is selected away, not multiplied by zero: unused cache may hold NaN.
    """
    weights = np.power(decay, np.maximum(age, 0))
    kept: NDArray[np.float64] = np.where(live[..., None], vectors, 0).astype(np.float64)
    total: NDArray[np.float64] = np.einsum("bn,bnh->bh", weights, kept)
    return total
