"""numpy as a device: replays what the fake target compiles, and holds the engine to the contract of an executor.

The model and the format of an executable are in llmc/compiler/targets/fake.py, its arithmetic in fake/program.py. A
specialised executable computes at its full static shape, including padding and unused cache, and masks values without a
live token, as compiled graphs do. So a wrong mask, slot or past changes results here too. Errors that a real device
would not notice are refused: a shape other than the compiled one, a past that the slot does not hold, tokens beyond the
cache.

The suffix of the device's name selects how steps are taken, as real devices differ in this (fake/kind.py). Memory and
graphs of a device that captures them are in fake/graphs.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from llmc.errors import ArtifactError, InputError
from llmc.runtime.executors.base import EXECUTABLES, Content, Executor
from llmc.runtime.executors.fake import card
from llmc.runtime.executors.fake.graphs import FakeGraphDevice
from llmc.runtime.executors.fake.kind import BLOCK_TOKENS, Kind
from llmc.runtime.executors.fake.program import Array, Ints, Program
from llmc.runtime.executors.held import Held
from llmc.runtime.executors.places import free_places, windows
from llmc.runtime.top_logits import top_of

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest_schema import Executable
    from llmc.buckets.bucket import Bucket
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.step import Step
    from llmc.runtime.top_logits import TopLogits

FAKE_VERSION = "1.0"
"""Version of the fake device's toolchain: a bundle runs on the very version that it was compiled with."""


class FakeExecutor(Executor):
    """See the module's docstring. The cache is one array [slots, places, hidden_size]: the model has no keys.

    Where the manifest says that the cache is a state, it is [slots, 1, hidden_size]: the vectors' faded sum alone.
    """

    name: ClassVar[str] = "fake"
    opens: ClassVar[Mapping[str, Content]] = {"weights": "data", EXECUTABLES: "by first bytes"}

    @classmethod
    def host(cls) -> Mapping[str, str]:
        """The card and its driver, on a host that has one."""
        return {} if card.here is None else {"card": card.here.name, "driver": card.here.driver}

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
        self.hidden = (bundle.cache_shape.states or bundle.cache_shape.kv)[0].values
        self._kind = Kind.of(bundle.manifest.device.partition(":")[2])
        widest = max(slots, *(b.batch for b in bundle.plan.buckets))
        self._buffer: Array = np.zeros((widest, bundle.size("vocab_size")), np.float32)
        self._programs: dict[str, Program] = {}
        self._device: FakeGraphDevice | None = None
        self._vectors: Array | None = None
        self._held = Held(slots, bundle.cache_shape.rewind)
        if self._kind.graph_memory is None:
            self.make_cache(slots)
        else:
            self._device = FakeGraphDevice(self, self._kind.graph_memory)

    def make_cache(self, slots: int) -> None:
        """An empty cache of so many slots."""
        self.slots = slots
        self._vectors = np.zeros((slots, self._places(self.capacity), self.hidden), np.float32)
        self._held = Held(slots, self.bundle.cache_shape.rewind)

    def _places(self, tokens: int) -> int:
        """Places of a slot for so many tokens; a state takes one."""
        return 1 if self.keeps_states else self.bundle.cache_shape.kv[0].places(tokens)

    @property
    def _cache(self) -> Array:
        if self._vectors is None:
            assert self._device is not None  # or it was made at once
            self._device.hold_cache(self.slots * self.capacity)
            self.make_cache(self.slots)
        assert self._vectors is not None
        return self._vectors

    def graph_device(self) -> FakeGraphDevice | None:
        """As the device was named."""
        return self._device

    @property
    def exact(self) -> bool:
        """True when one executable covers every shape."""
        return not self.bundle.manifest.options.get("static_dims")

    @property
    def ragged(self) -> bool:
        """As the device was named."""
        return self._kind.ragged

    @property
    def cache_tokens(self) -> int | None:
        """As the device was named."""
        return self._kind.cache_tokens

    @property
    def block_tokens(self) -> int:
        """Blocks are only counted: each slot has its place in the cache array all the same."""
        return 1 if self._kind.cache_tokens is None else BLOCK_TOKENS

    @property
    def scores_each(self) -> bool:
        """Where any shape runs, rows of any number of tokens do; a state takes back no token."""
        return self.exact and not self.keeps_states

    def executable_of(self, step: Step) -> str:
        """Name of the executable in the manifest."""
        return str(self._find(step.phase, step.batch, step.query, step.context))

    def program(self, bucket: Bucket) -> Program:
        """The executable of a bucket, opened."""
        return self._open(self._find(bucket.phase, bucket.batch, bucket.query, bucket.context))

    def warm(self, steps: list[tuple[str, int, int, int]]) -> None:
        """Open the named executables; the others open when first needed, in microseconds."""
        for shape in steps:
            self._open(self._find(*shape))

    def run(self, step: Step) -> Array:
        """One step at the executable's shape; rows without a request come back as NaN, since nobody may use them."""
        program, past = self._begin(step)
        given = step.token_ids, step.past_lengths, step.new_lengths, past
        if self._device is not None:
            given = self._device.inputs(step, past)
        logits, new = self.replay(program, *given)
        self._end(step, new)
        self._buffer.fill(np.nan)
        self._buffer[: len(step.slots)] = logits[: len(step.slots)]
        self._keep(self._buffer[: step.batch])
        return self.logits()

    def run_each(self, step: Step) -> Array:
        """As `run`, over each beginning of each row in turn: slow, and independent of how `run` sums."""
        if not self.scores_each:
            return super().run_each(step)
        if not self.ragged and len(step.slots) > 1 and step.query > 1:
            raise InputError(f"slots {step.slots}: rows of several tokens over a past run one at a time on this device")
        program, past = self._begin(step)
        scores = []
        for row in range(len(step.slots)):
            one = slice(row, row + 1)
            alone = program if program.adapters is None else replace(program, adapters=program.adapters[one])
            for count in range(1, int(step.new_lengths[row]) + 1):
                given = step.token_ids[one, :count], step.past_lengths[one], np.array([count])
                scores.append(self.replay(alone, *given, past[one])[0])
        given = step.token_ids, step.past_lengths, step.new_lengths
        self._end(step, self.replay(program, *given, past)[1])
        logits = np.concatenate(scores)
        self._keep(logits, each_of=step)
        return logits

    def replay(
        self, program: Program, token_ids: Ints, past_lengths: Ints, new_lengths: Ints, past: Array
    ) -> tuple[Array, Array]:
        """The device's arithmetic, see Program.replay: a broken device overrides it."""
        if self.keeps_states:
            logits, state = program.advance(token_ids, past_lengths, new_lengths, past[:, 0])
            return logits, state[:, None]
        return program.replay(token_ids, past_lengths, new_lengths, past)

    def _begin(self, step: Step) -> tuple[Program, Array]:
        """The executable for a step that can run, and its rows' pasts, [B, context, hidden_size] or fewer places, or
        their states, NaN for rows without a request."""
        self._check_past(step)
        program = self._open(self._find(step.phase, step.batch, step.query, step.context))
        if self.bundle.adapters:
            program = replace(program, adapters=step.row_adapters)
        if self.keeps_states:
            states = np.full((step.batch, 1, self.hidden), np.nan, np.float32)
            states[: len(step.slots)] = self._cache[list(step.slots)]
            return program, states
        past = np.zeros((step.batch, self._places(step.context), self.hidden), np.float32)
        for row, slot in enumerate(step.slots):
            past[row] = self._cache[slot, : past.shape[1]]
        return program, past

    def _end(self, step: Step, new: Array) -> None:
        """Put the new vectors into the cache."""
        for row, slot in enumerate(step.slots):
            start, count = int(step.past_lengths[row]), int(step.new_lengths[row])
            if self.keeps_states:
                self._cache[slot] = new[row]
            else:
                tokens = np.arange(max(0, count - self._cache.shape[1]), count)
                self._cache[slot, (start + tokens) % self._cache.shape[1]] = new[row, tokens]
            self._held.wrote(slot, start, start + count)

    def run_top(self, step: Step) -> TopLogits:
        """As `run`; what the executable was compiled to return."""
        self._require_top()
        return top_of(self.run(step), self.top_k)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy within the cache array."""
        self._held.require(source, length)
        self._require_room({target: length})
        self._cache[target, : self._places(length)] = self._cache[source, : self._places(length)]
        self._held.copied(source, target, length)

    def export_prefix(self, slot: int, length: int) -> list[Array]:
        """A copy of the token vectors, [1, length, hidden_size]; they are all that this model remembers. With a window
        zeros for tokens before it."""
        self._held.require(slot, length)
        if self.keeps_states:
            return [self._cache[slot].copy()[None]]
        return [np.array(windows(self.bundle.cache_shape.kv[0], self._cache[slot], length))[None]]

    def import_prefix(self, slot: int, prefix: list[Array]) -> None:
        """Copy token vectors into the cache array."""
        length = self._check_prefix(prefix, 1)
        self._require_room({slot: length})
        tokens = np.arange(max(0, length - self._cache.shape[1]), length)
        self._cache[slot, tokens % self._cache.shape[1]] = prefix[0][0][tokens]
        self._held.imported(slot, length)

    def poison(self, slot: int, start: int, value: float) -> None:
        """Overwrite what no live token owns: of a state, the slot's that holds none."""
        if start == 0:
            self._cache[slot] = value
        elif not self.keeps_states:
            self._cache[slot, free_places(self._cache.shape[1], start, self._held.used[slot])] = value

    def open_all(self) -> None:
        """Open every executable."""
        for executable in self.bundle.manifest.executables:
            self._open(executable)

    def memory(self) -> dict[str, int]:
        """Bytes of cache and logits, and the number of executables open; weights are mapped, not held."""
        return {
            "cache": 0 if self._vectors is None else self._vectors.nbytes,
            "logits": self._buffer.nbytes,
            "open_executables": len(self._programs),
        }

    def close(self) -> None:
        """Drop executables and with them the mapped weights."""
        self._programs.clear()
        self._logits = None

    def _find(self, phase: str, batch: int, query: int, context: int) -> Executable:
        """The manifest's executable for a shape; raises ArtifactError when the bundle has none."""
        return self.bundle.executable(*(("any", None, None, None) if self.exact else (phase, batch, query, context)))

    def _open(self, executable: Executable) -> Program:
        """The executable, read and verified when it is used first."""
        program = self._programs.get(executable.blob)
        if program is None:
            try:
                fields = json.loads(self.bundle.files.read(executable.blob))
                if (made_for := fields.get("card")) is not None:
                    self._require_card(executable, made_for)
                weights = self.bundle.files.path(fields["weights"])
                program = Program.load(fields, weights)
                sizes = self._buffer.shape[1], self.hidden
                if any(tensor.shape != sizes for tensor in (*program.embeddings, *program.heads)):
                    raise ValueError("its tensors are not of the sizes that the manifest states")
                if len(program.heads) != len(self.bundle.adapters) + 1:
                    raise ValueError("its tensors are not of the adapters that the manifest states")
                if program.top_k != self.top_k:
                    raise ValueError(f"it returns {program.top_k} top logits, the bundle's {self.top_k}")
            except (AttributeError, KeyError, TypeError, ValueError) as e:
                raise ArtifactError(
                    f"{self.bundle.path}: {executable} is not an executable of the fake device ({e}); "
                    f"compile again: {self.bundle.recompile_hint}"
                ) from e
            if executable.state != "native":
                self.compilations.record(str(executable))
            else:
                self.compilations.loaded(str(executable))
            self._programs[executable.blob] = program
        return program

    def _require_card(self, executable: Executable, made_for: object) -> None:
        """What a card runs is its code: not loaded from a bundle that counts as data, nor on another card."""
        self.bundle.files.require_native(f"executable {executable}")
        if card.here is None or made_for != card.here.name:
            raise ValueError(f"it is for the card {made_for!r:.80}")

    def _check_past(self, step: Step) -> None:
        """Raise InputError for a step that no cache of this size and content can serve."""
        if not self.ragged:
            self._check_rectangle(step)
        self._check_step(step, self._held, first_slots=not self.ragged)
        ends = (step.past_lengths + step.new_lengths).tolist()
        self._require_room(dict(zip(step.slots, ends, strict=False)))

    def _check_rectangle(self, step: Step) -> None:
        longest = step.context + step.query
        if longest > self.capacity:
            raise InputError(
                f"past and query of a {step.phase} step take {longest} tokens; the cache holds {self.capacity}"
            )

    def _require_room(self, changed: dict[int, int]) -> None:
        """Raise InputError when the slots' tokens, once `changed`, are more than the pool."""
        if self.cache_tokens is None:
            return
        held = [changed.get(slot, used) for slot, used in enumerate(self._held.used)]
        taken = sum(-(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS for tokens in held)
        if taken > self.cache_tokens:
            raise InputError(f"the slots' blocks take {taken} tokens; the cache holds {self.cache_tokens}")
