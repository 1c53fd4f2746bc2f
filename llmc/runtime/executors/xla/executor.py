"""XLA executables, through PJRT: on CPU, and on a TPU host what was compiled for its topology.

Keys and values of all slots lie on the device [layers, slots, kv_heads, capacity, head_dim], sized when the bundle was
compiled. A step takes them, writes the live rows' live tokens into their slots, and gives them back in place; a larger
bucket reads more of them. What else happens to slots (copies, import, export, poison) are programs of the bundle, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from llmc.artifacts.log import logger
from llmc.errors import ArtifactError, DeviceError, InputError
from llmc.runtime.executors.base import EXECUTABLES, Content, require_held
from llmc.runtime.executors.static import StaticExecutor
from llmc.runtime.executors.xla.client import Platform, has_tpu, jax_version, open_client
from llmc.runtime.executors.xla.compile_events import JaxWitness, told
from llmc.runtime.executors.xla.envelope import Envelope
from llmc.runtime.executors.xla.exported import mesh_of, sharding_of
from llmc.runtime.top_logits import TopLogits

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest_schema import Executable
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.executors.witness import Witness
    from llmc.runtime.executors.xla.loaded import LoadedProgram
    from llmc.runtime.step import Step

Array = NDArray[np.float32]
SLOT_PROGRAMS = ("slot_copy", "slot_fill", "slot_read", "slot_write")


class XlaExecutor(StaticExecutor):
    """See the module's docstring. `threads` counts where JAX has not computed in this process yet."""

    name: ClassVar[str] = "xla"
    opens: ClassVar[Mapping[str, Content]] = {
        "weights": "data", "weights.json": "data", EXECUTABLES: "code", **dict.fromkeys(SLOT_PROGRAMS, "code"),
    }  # fmt: skip

    @classmethod
    def check(cls, bundle: Bundle) -> None:
        """Refuse a host without JAX, and native code for instructions that this CPU lacks."""
        from llmc.runtime.host import cpu_features

        here = jax_version()
        made = bundle.manifest.toolchain
        missing = sorted(set(bundle.manifest.isa) - set(cpu_features()))
        if missing and here == f"{made.get('jax')} {made.get('jaxlib')}":
            raise DeviceError(
                f"{bundle.path}: compiled for a CPU with {', '.join(missing)}, which this one lacks; compile it here: "
                f"{bundle.recompile_hint}"
            )

    def __init__(self, bundle: Bundle, slots: int, capacity: int, threads: int) -> None:
        import jax.numpy as jnp
        from jax.sharding import NamedSharding, PartitionSpec

        super().__init__(bundle, slots, capacity, threads)
        from llmc.runtime.executors.xla.weights import DeviceWeights

        self._compile_events = JaxWitness()
        manifest = bundle.manifest
        platform: Platform = "tpu" if manifest.target == "tpu" and has_tpu() else "cpu"
        self._devices = open_client(platform, bundle.option("tensor_parallel", 1), threads)
        self._programs: dict[str, LoadedProgram] = {}
        self._slot_programs = {name: self._load(name, name) for name in SLOT_PROGRAMS}
        self._native = self._slot_programs["slot_fill"].native
        keys, values = self._slot_programs["slot_fill"].header.inputs[:2]
        _, held, _, longest, _ = keys.shape
        if slots > held:
            raise InputError(
                f"{bundle.path}: its cache holds {held} sequences, asked for {slots}; compile it with --cache-slots "
                f"{slots}"
            )
        self.capacity = min(capacity, longest)
        self._weights = DeviceWeights(bundle, self._devices)
        self._mesh = mesh_of(self._devices)
        with told(self.compilations.opened):
            self._cache = [jnp.zeros(t.shape, t.dtype, device=sharding_of(self._mesh, t)) for t in (keys, values)]
        self._everywhere = self._devices[0] if len(self._devices) == 1 else NamedSharding(self._mesh, PartitionSpec())
        self._bound: dict[str, list[Any]] = {}
        self._used = [0] * slots
        self._outputs: list[Any] = []

    def warm(self, steps: list[tuple[str, int, int, int]]) -> None:
        """Open the named executables; the others open when first needed.

        Where they have to be compiled here, all are, so that none is compiled while a request waits for it.
        """
        if not self._native:
            self.open_all()
        super().warm(steps)

    def open_all(self) -> None:
        """Open every executable, one after the other."""
        if not self._native:
            logger().warning(
                "%s: %d executables of jax %s for %s are compiled here from their portable programs",
                self.bundle.path, len(self.bundle.manifest.executables), self.bundle.manifest.toolchain.get("jax"),
                self.bundle.manifest.device,
            )  # fmt: skip
        super().open_all()

    def witnesses(self) -> Sequence[Witness]:
        """And every compilation of JAX since the executor was opened."""
        return (*super().witnesses(), self._compile_events)

    def run(self, step: Step) -> Array:
        """One step at the executable's shape; dummy rows write nothing."""
        self._run(step)
        return self.logits()

    def run_top(self, step: Step) -> TopLogits:
        """As `run`; XLA's top-k puts the lower id first where values are equal."""
        self._require_top()
        self._run(step)
        return TopLogits(np.asarray(self._outputs[1]), np.asarray(self._outputs[2]).astype(np.int64))

    def logits(self) -> Array:
        """The last step's, which come to the host when they are asked for."""
        if self._outputs:
            self._keep(np.asarray(self._outputs[0]))
        return super().logits()

    def _run(self, step: Step) -> None:
        self._check_step(step, self._used, first_slots=True)
        program, weights = self._open(self._executable(step))
        slots = np.full(step.batch, -1, np.int32)
        slots[: len(step.slots)] = step.slots
        given = [a.astype(np.int32) for a in (step.token_ids, step.past_lengths, step.new_lengths)]
        with told(self.compilations.record):
            *self._outputs, keys, values = program.run([*self._put(*given, slots), *self._cache, *weights])
        self._cache = [keys, values]
        for row, slot in enumerate(step.slots):
            self._used[slot] = int(step.past_lengths[row] + step.new_lengths[row])

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy within the cache, on the device."""
        require_held(self._used, source, length)
        if source != target:
            self._change("slot_copy", *self._numbers(source, target, length))
        self._used[target] = length

    def export_prefix(self, slot: int, length: int) -> list[Array]:
        """The slot as it lies on the device, cut to `length` tokens, in float32."""
        require_held(self._used, slot, length)
        rows = self._slot_programs["slot_read"].run([*self._cache, *self._numbers(slot)])
        keys, values = (np.asarray(r)[:, :, :length].astype(np.float32) for r in rows)
        return [t for pair in zip(keys, values, strict=True) for t in pair]

    def import_prefix(self, slot: int, prefix: list[Array]) -> None:
        """Write a slot, rounded to the cache's dtype."""
        program = self._slot_programs["slot_write"].header
        layers, _, heads, capacity, size = program.inputs[0].shape
        length = self._check_prefix(prefix, 2 * layers)
        rows = np.zeros((2, layers, heads, capacity, size), self._cache[0].dtype)
        rows[:, :, :, :length] = np.stack([np.stack(prefix[::2]), np.stack(prefix[1::2])])
        self._change("slot_write", *self._numbers(slot, length), *self._put_as(program.inputs[4:], *rows))
        self._used[slot] = length

    def poison(self, slot: int, start: int, value: float) -> None:
        """Overwrite what no live token owns."""
        self._change("slot_fill", *self._numbers(slot, start), *self._put(np.float32(value)))

    def memory(self) -> dict[str, int]:
        """Bytes of the cache, of the mapped weights, and of the opened executables' files."""
        opened = sum(self.bundle.manifest.blobs[blob] for blob in self._bound)
        return {
            "cache": sum(c.nbytes for c in self._cache), "weights": self._weights.nbytes, "executables": opened,
        }  # fmt: skip

    def close(self) -> None:
        """Drop executables, weights and cache."""
        self._programs.clear()
        self._slot_programs.clear()
        self._bound.clear()
        self._weights.close()
        self._cache, self._outputs, self._logits = [], [], None

    def _open(self, executable: Executable) -> tuple[LoadedProgram, list[Any]]:
        """An executable's program, and the weights that it takes."""
        if executable.blob not in self._bound:
            program = self._programs[executable.blob] = self._load(executable.blob, str(executable))
            with told(self.compilations.opened):
                self._bound[executable.blob] = [self._weights.array(t) for t in program.header.inputs[6:]]
        return self._programs[executable.blob], self._bound[executable.blob]

    def _load(self, file: str, name: str) -> LoadedProgram:
        from llmc.runtime.executors.xla.loaded import LoadedProgram

        if file in SLOT_PROGRAMS and file not in self.bundle.manifest.files:
            raise ArtifactError(f"{self.bundle.path}: no {file} in the bundle; compile it again")
        source = f"{self.bundle.path}: {name}"
        self.bundle.files.require_native(name)
        return LoadedProgram(
            Envelope.parse(self.bundle.files.read(file), source), name, self._devices, source, self.compilations
        )

    def _change(self, program: str, *arguments: Any) -> None:
        with told(self.compilations.record):
            self._cache = self._slot_programs[program].run([*self._cache, *arguments])

    def _numbers(self, *numbers: int) -> list[Any]:
        return self._put(*(np.int32(n) for n in numbers))

    def _put(self, *arrays: Any) -> list[Any]:
        """Small inputs, whole on every device."""
        import jax

        put: list[Any] = jax.device_put(list(arrays), self._everywhere)
        return put

    def _put_as(self, tensors: Any, *arrays: Any) -> list[Any]:
        import jax

        return [jax.device_put(a, sharding_of(self._mesh, t)) for a, t in zip(arrays, tensors, strict=True)]
