"""numpy as a device: replays what the fake target compiles, and holds the engine to the contract of an executor.

The model and executable format are in llmc/compiler/targets/fake.py, the arithmetic and the variants in fake/device.py.
A specialised executable computes at its full static shape, including padding and unused cache, and masks values without
a live token, as compiled graphs do. A wrong mask, slot or past therefore changes results. Errors that a real device
would not notice raise: a shape other than the compiled one, a past that the slot does not hold, tokens beyond the
cache.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from llmc.buckets.bucket import Bucket
from llmc.buckets.render.text import size_text
from llmc.errors import ArtifactError, InputError, OutOfDeviceMemoryError
from llmc.runtime.executors.base import (
    EXECUTABLES,
    LENGTHS,
    TOKEN_IDS,
    Capabilities,
    ExecutorDescription,
    StaticExecutor,
)
from llmc.runtime.executors.encoders import Encoder
from llmc.runtime.executors.fake import device
from llmc.runtime.executors.fake.device import BLOCK_TOKENS, FakeKind, FakeProgram, Floats, Ints
from llmc.runtime.executors.slots import SlotLengths, free_offsets, slots_in, windows
from llmc.runtime.step import Step, pad

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest import Executable
    from llmc.runtime.bundle import Bundle

NUMBER = 4
"""Bytes of a float32."""

FAKE_VERSION = "1.0"
"""Version of the fake device's toolchain. A bundle runs only with the version that compiled it."""


def host() -> Mapping[str, str]:
    """The fake GPU and its driver, if this host has one."""
    return {} if device.here is None else {"gpu": device.here.name, "driver": device.here.driver}


class FakeExecutor(StaticExecutor):
    """Runs steps in numpy. The cache is one array [slots, token slots, hidden_size], because the model has no keys.

    Recurrent state is [slots, 1, hidden_size]: the decayed sum of the vectors.
    """

    description: ClassVar[ExecutorDescription] = ExecutorDescription(
        {"weights": "data", EXECUTABLES: "by first bytes"}, host=host
    )

    @classmethod
    def check(cls, bundle: Bundle) -> None:
        built_with = bundle.manifest.toolchain.get("fake")
        if built_with != FAKE_VERSION:
            raise ArtifactError(
                f"{bundle.path}: compiled with the fake device {built_with}, this host has {FAKE_VERSION}; "
                f"compile again: {bundle.recompile_hint}"
            )

    def __init__(self, bundle: Bundle, slots: int, capacity: int, threads: int) -> None:
        super().__init__(bundle, slots, capacity, threads)
        self.hidden = (bundle.cache_shape.states or bundle.cache_shape.kv)[0].values
        kind = FakeKind.of(bundle.manifest.device.partition(":")[2])
        self._has_states = bool(bundle.cache_shape.states)
        widest = max(slots, *(b.batch for b in bundle.plan.buckets))
        self._buffer: Floats = np.zeros((widest, bundle.size("vocab_size")), np.float32)
        self._programs: dict[str, FakeProgram] = {}
        self._device: FakeGraphDevice | None = None
        self._vectors: Floats | None = None
        self._held = SlotLengths(slots, bundle.cache_shape.rewind)
        if kind.graph_memory is None:
            self.make_cache(slots)
        else:
            self._device = FakeGraphDevice(self, kind.graph_memory)
        exact = not bundle.manifest.options.get("static_dims")
        self.capabilities = Capabilities(
            exact=exact, ragged=kind.ragged, scores_each=exact and not self._has_states, cache_tokens=kind.cache_tokens,
            block_tokens=1 if kind.cache_tokens is None else BLOCK_TOKENS, graph_device=self._device,
        )  # fmt: skip

    def make_cache(self, slots: int) -> None:
        self.slots = slots
        self._vectors = np.zeros((slots, self._offsets(self.capacity), self.hidden), np.float32)
        self._held = SlotLengths(slots, self.bundle.cache_shape.rewind)

    def _offsets(self, tokens: int) -> int:
        return 1 if self._has_states else self.bundle.cache_shape.kv[0].token_slots(tokens)

    @property
    def _cache(self) -> Floats:
        if self._vectors is None:
            assert self._device is not None  # or it was made at once
            self._device.hold_cache(self.slots * self.capacity)
            self.make_cache(self.slots)
        assert self._vectors is not None
        return self._vectors

    def program(self, bucket: Bucket) -> FakeProgram:
        return self._open(self._find(bucket.phase, bucket.batch, bucket.query, bucket.context))

    def run(self, step: Step) -> Floats:
        """Run a step at the executable's shape. Rows without a request return NaN, because nobody may use them."""
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

    def run_each(self, step: Step) -> Floats:
        """Run each prefix of each row in turn: slow, and independent of how `run` sums."""
        if not self.capabilities.scores_each:
            return super().run_each(step)
        if not self.capabilities.ragged and len(step.slots) > 1 and step.query > 1:
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
        self, program: FakeProgram, token_ids: Ints, past_lengths: Ints, new_lengths: Ints, past: Floats
    ) -> tuple[Floats, Floats]:
        """Run FakeProgram.replay; tests of a broken device override this."""
        if self._has_states:
            logits, state = program.advance(token_ids, past_lengths, new_lengths, past[:, 0])
            return logits, state[:, None]
        return program.replay(token_ids, past_lengths, new_lengths, past)

    def _begin(self, step: Step) -> tuple[FakeProgram, Floats]:
        """The executable of a step, and its rows' pasts, [B, context, hidden_size] or fewer, or states; NaN without a
        request.
        """
        self._check_past(step)
        program = self._open(self._executable(step))
        if self.bundle.adapters:
            program = replace(program, adapters=step.row_adapters)
        if self._has_states:
            states = np.full((step.batch, 1, self.hidden), np.nan, np.float32)
            states[: len(step.slots)] = self._cache[list(step.slots)]
            return program, states
        past = np.zeros((step.batch, self._offsets(step.context), self.hidden), np.float32)
        for row, slot in enumerate(step.slots):
            past[row] = self._cache[slot, : past.shape[1]]
        return program, past

    def _end(self, step: Step, new: Floats) -> None:
        for row, slot in enumerate(step.slots):
            start, count = int(step.past_lengths[row]), int(step.new_lengths[row])
            if self._has_states:
                self._cache[slot] = new[row]
            else:
                tokens = np.arange(max(0, count - self._cache.shape[1]), count)
                self._cache[slot, (start + tokens) % self._cache.shape[1]] = new[row, tokens]
        self._held.ran(step)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        self._held.require(source, length)
        self._require_room({target: length})
        self._cache[target, : self._offsets(length)] = self._cache[source, : self._offsets(length)]
        self._held.copied(source, target, length)

    def export_prefix(self, slot: int, length: int) -> list[Floats]:
        self._held.require(slot, length)
        if self._has_states:
            return [self._cache[slot].copy()[None]]
        return [np.array(windows(self.bundle.cache_shape.kv[0], self._cache[slot], length))[None]]

    def import_prefix(self, slot: int, prefix: list[Floats]) -> None:
        length = self._check_prefix(prefix, 1)
        self._require_room({slot: length})
        tokens = np.arange(max(0, length - self._cache.shape[1]), length)
        self._cache[slot, tokens % self._cache.shape[1]] = prefix[0][0][tokens]
        self._held.imported(slot, length)

    def nan_fill(self, slot: int, start: int, value: float) -> None:
        if start == 0:
            self._cache[slot] = value
        elif not self._has_states:
            self._cache[slot, free_offsets(self._cache.shape[1], start, self._held.used[slot])] = value

    def memory(self) -> dict[str, int]:
        return {
            "cache": 0 if self._vectors is None else self._vectors.nbytes,
            "logits": self._buffer.nbytes,
            "open_executables": len(self._programs),
        }

    def close(self) -> None:
        self._programs.clear()
        self._logits = None

    def _find(self, phase: str, batch: int, query: int, context: int) -> Executable:
        if self.capabilities.exact:
            return self.bundle.executable("any", None, None, None)
        return super()._find(phase, batch, query, context)

    def _open(self, executable: Executable) -> FakeProgram:
        program = self._programs.get(executable.blob)
        if program is None:
            try:
                fields = json.loads(self.bundle.files.read(executable.blob))
                if (built_for := fields.get("gpu")) is not None:
                    self._require_gpu(executable, built_for)
                weights = self.bundle.files.path(fields["weights"])
                program = FakeProgram.load(fields, weights)
                sizes = self._buffer.shape[1], self.hidden
                if any(tensor.shape != sizes for tensor in (*program.embeddings, *program.heads)):
                    raise ValueError("its tensors are not of the sizes that the manifest states")
                if len(program.heads) != len(self.bundle.adapters) + 1:
                    raise ValueError("its tensors are not of the adapters that the manifest states")
                if program.top_k != self.bundle.sample_top_k:
                    raise ValueError(f"it returns {program.top_k} top logits, the bundle's {self.bundle.sample_top_k}")
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

    def _require_gpu(self, executable: Executable, built_for: object) -> None:
        """Target-compiled executables are code: reject them in a data-only bundle, and on another fake GPU."""
        self.bundle.files.require_native(f"executable {executable}")
        if device.here is None or built_for != device.here.name:
            raise ValueError(f"it is for the GPU {built_for!r:.80}")

    def _check_past(self, step: Step) -> None:
        if not self.capabilities.ragged:
            longest = step.context + step.query
            if longest > self.capacity:
                raise InputError(
                    f"past and query of a {step.phase} step take {longest} tokens; the cache holds {self.capacity}"
                )
        self._check_step(step, self._held, first_slots=not self.capabilities.ragged)
        ends = (step.past_lengths + step.new_lengths).tolist()
        self._require_room(dict(zip(step.slots, ends, strict=False)))

    def _require_room(self, changed: dict[int, int]) -> None:
        room = self.capabilities.cache_tokens
        if room is None:
            return
        held = [changed.get(slot, used) for slot, used in enumerate(self._held.used)]
        taken = sum(-(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS for tokens in held)
        if taken > room:
            raise InputError(f"the slots' blocks take {taken} tokens; the cache holds {room}")


StepInputs: TypeAlias = tuple[Ints, Ints, Ints, Floats]
"""token_ids [B, Q], past_lengths [B], new_lengths [B] and past [B, context, H] of a step, or a graph's buffers."""


class FakeGraphDevice:
    """The GraphDevice of a fake executor with `total` bytes. Raises OutOfDeviceMemoryError if the weights do not fit.

    A step without a graph computes in the workspace, which grows to the largest such step and never shrinks, like an
    allocator's pool. A graph owns buffers in its bucket's shape, to which a replay copies its inputs.

    Tests override `size_of`, a graph's size, and `free_memory`, the device's answer.
    """

    graphs = "fake graphs"

    def __init__(self, executor: FakeExecutor, total: int) -> None:
        self._executor, self._total = executor, total
        self._hidden, self._vocab = executor.hidden, executor.bundle.size("vocab_size")
        self._weights = 2 * self._vocab * self._hidden * NUMBER
        self._workspace = self._cache = 0
        self._captured: dict[Bucket, tuple[StepInputs, int]] = {}
        self._require(0, f"{size_text(self._weights)} of weights do not fit; name the device with more")

    @property
    def block_bytes(self) -> int:
        return self._executor.bundle.plan.limits.block_size * self._hidden * NUMBER

    def total_memory(self) -> int:
        return self._total

    def free_memory(self) -> int:
        return self._left

    def size_of(self, bucket: Bucket) -> int:
        vectors = bucket.batch * (bucket.context + bucket.query) * self._hidden
        integers = 2 * bucket.batch * (bucket.query + 2)
        return NUMBER * (vectors + integers + bucket.batch * self._vocab)

    def expected(self, bucket: Bucket) -> int:
        return self.size_of(bucket)

    def run(self, bucket: Bucket) -> None:
        self._work(bucket)
        token_ids, past_lengths, new_lengths, past = self._buffers(bucket)
        self._executor.replay(self._executor.program(bucket), token_ids, past_lengths, new_lengths + 1, past)

    def allocate(self, blocks: int) -> None:
        executor = self._executor
        tokens = blocks * executor.bundle.plan.limits.block_size
        slots = slots_in(tokens, executor.capacity)
        self.hold_cache(tokens)
        executor.make_cache(slots)

    def hold_cache(self, tokens: int) -> None:
        """Reserve the bytes of a KV cache of `tokens` tokens. Raises OutOfDeviceMemoryError."""
        size = tokens * self._hidden * NUMBER
        self._require(size, f"a KV cache of {tokens} tokens takes {size_text(size)}; compile for fewer or shorter ones")
        self._cache = size

    def capture(self, bucket: Bucket) -> int:
        self._executor.run(pad(bucket, [0], [[0] * bucket.query], [0]))
        size = self.size_of(bucket)
        self._require(size, f"the graph of {bucket} takes {size_text(size)}")
        self._captured[bucket] = self._buffers(bucket), size
        return size

    def inputs(self, step: Step, past: Floats) -> StepInputs:
        """The buffers from which a step is computed: its bucket's graph buffers, or the step in the workspace."""
        bucket = Bucket(step.phase, step.batch, step.query, step.context)
        given = step.token_ids, step.past_lengths, step.new_lengths, past
        if bucket not in self._captured:
            self._work(bucket)
            return given
        buffers, _ = self._captured[bucket]
        token_ids, past_lengths, new_lengths, held = buffers
        token_ids[...], past_lengths[...], new_lengths[...], held[...] = given
        return buffers

    def _buffers(self, bucket: Bucket) -> StepInputs:
        batch = bucket.batch
        return (
            np.zeros((batch, bucket.query), np.int64), np.zeros(batch, np.int64), np.zeros(batch, np.int64),
            np.zeros((batch, bucket.context, self._hidden), np.float32),
        )  # fmt: skip

    @property
    def _left(self) -> int:
        graphs = sum(size for _, size in self._captured.values())
        return self._total - self._weights - self._workspace - self._cache - graphs

    def _work(self, bucket: Bucket) -> None:
        more = max(0, self.size_of(bucket) - self._workspace)
        self._require(more, f"running {bucket} takes {size_text(more)} more")
        self._workspace += more

    def _require(self, more: int, what: str) -> None:
        if self._left < more:
            raise OutOfDeviceMemoryError(
                f"the fake device has {size_text(max(0, self._left))} of {size_text(self._total)} free: {what}"
            )


class FakeEncoder(Encoder):
    """Replays fake encoder executables. It has as many independent streams as threads."""

    description: ClassVar[ExecutorDescription] = ExecutorDescription({"weights": "data", EXECUTABLES: "data"})

    @classmethod
    def check(cls, bundle: Bundle) -> None:
        FakeExecutor.check(bundle)

    @property
    def streams(self) -> int:
        return self.threads

    def encode(self, inputs: Mapping[str, NDArray[np.int64]], stream: int = 0) -> NDArray[np.float32]:
        """Each token's output is a sum over live tokens, weighted by distance. Padding is masked by selection."""
        ids, lengths = inputs[TOKEN_IDS], inputs[LENGTHS]
        program, (embedding, head) = self._open(self.executable_for(*ids.shape))
        compiled = program["batch"], program["query"]
        if any(fixed not in (None, size) for fixed, size in zip(compiled, ids.shape, strict=True)):
            raise ArtifactError(
                f"an executable compiled for batch, query {compiled} was given {ids.shape}; compile again"
            )
        at = np.arange(ids.shape[1])
        vectors = (1 + at / program["positions"])[:, None] * embedding[ids]
        live = np.where((at < lengths[:, None])[..., None], vectors, 0).astype(np.float64)
        hidden = np.einsum("tj,bjh->bth", np.power(program["decay"], np.abs(at[:, None] - at)), live)
        if program["labels"]:
            hidden = hidden[:, 0] @ head[: program["labels"]].T.astype(np.float64)
        found: NDArray[np.float32] = hidden.astype(np.float32)
        return found

    def _load(self, executable: Executable) -> tuple[dict[str, Any], list[NDArray[np.float32]]]:
        program, weights = json.loads(self.bundle.files.read(executable.blob)), self.bundle.files.path("weights")
        placements = [program["tensors"][name] for name in ("embedding", "head")]
        return program, [np.memmap(weights, np.float32, "r", at["offset"], tuple(at["shape"])) for at in placements]
