"""Portable programs in torch on CPU: proves a bundle's plan, padding and numbers without its own device.

Programs are read without pickle (portable_program.py) and replayed operator by operator; nothing is compiled. Weights
are views of the mapped weights file, shared by all programs and, as page cache, by all processes. The cache is one
tensor [2 · layers, slots, kv_heads, capacity, head_dim] in the bundle's dtype, key and value of each layer in turn. A
step passes read-only slices of it and writes the new tokens' keys and values afterwards, so nothing that a padding row
or column computes is ever kept.
"""

from __future__ import annotations

import logging
import math
import mmap
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from llmc.errors import ArtifactError, DeviceError
from llmc.platforms import how_to_install
from llmc.runtime.executors.base import EXECUTABLES, Capabilities, ExecutorDescription, StaticExecutor
from llmc.runtime.executors.slots import SlotLengths
from llmc.runtime.executors.torch.cache import TorchCache
from llmc.runtime.executors.weight_placements import map_weights, read_placements
from llmc.runtime.portable_program import PortableProgram
from llmc.runtime.top_logits import TopLogits, top_of

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest import Executable
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.step import Step

Array = NDArray[np.float32]

_log = logging.getLogger("llmc")
_DTYPES = {"f32": "float32", "bf16": "bfloat16"}


class TorchExecutor(StaticExecutor):
    """Replays portable programs on the CPU. `threads` sets torch's thread count, which is one number per process."""

    description: ClassVar[ExecutorDescription] = ExecutorDescription(
        {"weights": "data", "weights.json": "data", EXECUTABLES: "data"}
    )

    _stands_for: ClassVar[str] = ""
    """The bundle's device, which the CPU replaces."""

    @classmethod
    def check(cls, bundle: Bundle) -> None:
        """Reject a host without torch or with another release (major.minor), within which operators are stable."""
        built_with, here = torch_releases(bundle)
        if release(built_with) != release(here):
            raise ArtifactError(
                f"{bundle.path}: compiled with torch {built_with or 'of an unknown version'}, this host has {here}; "
                f"install torch=={'.'.join(release(built_with))}.*, or compile again: {bundle.recompile_hint}"
            )

    def __init__(self, bundle: Bundle, slots: int, capacity: int, threads: int) -> None:
        import torch

        super().__init__(bundle, slots, capacity, threads)
        torch.set_num_threads(threads)
        dtype = str(bundle.manifest.options.get("dtype"))
        if dtype not in _DTYPES:
            raise ArtifactError(f"{bundle.path}: dtype {dtype!r} is unknown; compile again: {bundle.recompile_hint}")
        self._torch = torch
        self._dtype = getattr(torch, _DTYPES[dtype])
        self._vocabulary = bundle.size("vocab_size")
        self.capabilities = Capabilities(exact=False, cache_dtype=dtype, in_place_of=self._stands_for)
        self._tensors = len(bundle.cache_shape)
        self._reads_tokens = bundle.plan.limits.contexts
        self._weights = TorchWeights(bundle)
        self._programs: dict[str, OpenedProgram] = {}
        self._held = SlotLengths(slots, bundle.cache_shape.rewind)
        self._cache: Any = self._make_cache()

    def _make_cache(self) -> Any:
        return TorchCache(self.bundle.cache_shape, self.slots, self.capacity, self._dtype)

    def _open_cache(self) -> Any:
        return self._cache

    def run(self, step: Step) -> Array:
        """Run a step at the program's shape. Rows without a request read other slots and write nothing."""
        self._keep(self._run(step)[0].float().numpy())
        return self.logits()

    def run_top(self, step: Step) -> TopLogits:
        """A program may return any of the tokens that tie with its last one; all logits resolve the tie."""
        k = self._require_top()
        logits, *top = self._run(step)
        self._keep(logits.float().numpy())
        values, ids = top or self._torch.topk(logits, k)
        found = ordered(values.float().numpy(), ids.numpy())
        tied = np.flatnonzero((self.logits() >= found.values[:, -1:]).sum(-1) > k)
        return settled(found, tied, self.logits()[tied])

    def _run(self, step: Step) -> list[Any]:
        self._check_step(step, self._held)
        opened = self._open(self._executable(step))
        with self._torch.inference_mode():
            try:
                found = self._replay(step, opened)
            except (RuntimeError, ValueError, TypeError, IndexError) as e:
                raise ArtifactError(
                    f"{self.bundle.path}: {self._executable(step)} does not run here ({e}); compile again: "
                    f"{self.bundle.recompile_hint}"
                ) from e
        self._held.ran(step)
        return found

    def _replay(self, step: Step, opened: OpenedProgram) -> list[Any]:
        """Logits, and the top values and ids if programs return them, on the host; new tokens are in the cache."""
        torch = self._torch
        lengths = [torch.from_numpy(np.array(a, np.int64)) for a in (step.past_lengths, step.new_lengths)]
        token_ids = torch.from_numpy(np.array(step.token_ids, np.int64))
        past = self._cache.past(step) if opened.program.cache_inputs else ()
        found = opened.program.run(token_ids, *lengths, *past, *opened.weights)
        top, new = found[: -self._tensors], found[-self._tensors :]
        self._require_logits(top[0].shape[-1])
        self._cache.append(step, new)
        return list(top)

    def _require_logits(self, count: int) -> None:
        if count != self._vocabulary:
            raise ValueError(f"it returns {count} logits, the manifest says {self._vocabulary}")

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        self._held.require(source, length)
        if source != target and length:
            self._open_cache().copy(source, target, length)
        self._held.copied(source, target, length)

    def export_prefix(self, slot: int, length: int) -> list[Array]:
        self._held.require(slot, length)
        return list(self._open_cache().read(slot, length))

    def import_prefix(self, slot: int, prefix: list[Array]) -> None:
        length = self._check_prefix(prefix, self._tensors)
        self._open_cache().write(slot, length, prefix)
        self._held.imported(slot, length)

    def nan_fill(self, slot: int, start: int, value: float) -> None:
        self._open_cache().nan_fill(slot, start, value, self._held.used[slot])

    def memory(self) -> dict[str, int]:
        return {
            "cache": self._cache.nbytes,
            "weights_mapped": self._weights.size,
            "open_executables": len(self._programs),
        }

    def close(self) -> None:
        self._programs.clear()
        self._weights.close()
        self._cache.drop()

    @property
    def _runs_on(self) -> Any:
        return "cpu"

    def _weight(self, name: str) -> Any:
        return self._weights.tensor(name)

    def _program(self, executable: Executable, data: bytes) -> bytes:
        """The portable program in an executable's file, here the whole file."""
        del executable
        return data

    def _open(self, executable: Executable) -> OpenedProgram:
        """The program, read and verified on first use (0.2 s for 30 layers). It stays open, at well under 1 MB."""
        opened = self._programs.get(executable.blob)
        if opened is not None:
            return opened
        data = self._program(executable, self.bundle.files.read(executable.blob))
        try:
            program = PortableProgram.parse(data, self._runs_on)
            if program.sizes != (executable.batch, executable.query):
                raise ValueError(f"its batch and query are {program.sizes}")
            if program.cache_inputs != (self._tensors if executable.context or not self._reads_tokens else 0):
                raise ValueError(f"it takes {program.cache_inputs} cache tensors")
            if program.outputs != 1 + 2 * bool(self.bundle.sample_top_k) + self._tensors:
                raise ValueError(f"it returns {program.outputs} tensors")
            opened = OpenedProgram(program, [self._weight(name) for name in program.weights])
        except ValueError as e:
            raise ArtifactError(
                f"{self.bundle.path}: {executable} is not a portable program of this model: {e}; "
                f"compile again: {self.bundle.recompile_hint}"
            ) from e
        self._programs[executable.blob] = opened
        self.compilations.loaded(str(executable))
        return opened


def ordered(values: Array, ids: NDArray[np.int64]) -> TopLogits:
    """TopLogits from rows of top logits: copies in descending order, ties by lower id."""
    order = np.lexsort((ids, -values))
    return TopLogits(
        np.take_along_axis(values, order, -1).astype(np.float32), np.take_along_axis(ids, order, -1).copy()
    )


def settled(top: TopLogits, tied: NDArray[np.intp], logits: Array) -> TopLogits:
    """`top` with its rows `tied` recomputed from all their `logits`, [len(tied), V], as others equal a row's last."""
    whole = top_of(logits, top.ids.shape[-1])
    top.values[tied], top.ids[tied] = whole.values, whole.ids
    return top


class OpenedProgram:
    """A program with its weights in the order of its inputs."""

    def __init__(self, program: PortableProgram, weights: list[Any]) -> None:
        self.program = program
        self.weights = weights


class TorchWeights:
    """The bundle's mapped weights file; tensors are views of it. Raises ArtifactError if the bundle lacks it."""

    def __init__(self, bundle: Bundle) -> None:
        self._placements = read_placements(bundle)
        # private pages: shared until written to, and nothing writes to them; torch takes no read-only buffer
        self._mapped: mmap.mmap | bytes = map_weights(bundle, mmap.ACCESS_COPY)
        self.size = len(self._mapped)
        self._tensors: dict[str, Any] = {}

    def names(self) -> list[str]:
        return list(self._placements)

    def tensor(self, name: str) -> Any:
        import torch

        if name in self._tensors:
            return self._tensors[name]
        try:
            placement = self._placements[name]
            shape, offset, length = tuple(placement["shape"]), placement["offset"], placement["length"]
            if placement["dtype"] not in _DTYPES.values():
                raise ValueError(f"weight {name!r:.80} has dtype {placement['dtype']!r:.80}")
            dtype = getattr(torch, placement["dtype"])
            if not 0 <= offset <= self.size - length or length != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"weight {name!r:.80} of shape {shape} does not fit its location in the weights file")
            tensor = torch.frombuffer(self._mapped, dtype=dtype, count=math.prod(shape), offset=offset).view(shape)
        except (KeyError, TypeError, AttributeError) as e:
            raise ValueError(f"weights.json has no valid entry for {name!r:.80} ({type(e).__name__}: {e})") from e
        self._tensors[name] = tensor
        return tensor

    def close(self) -> None:
        """The pages are unmapped with the last tensor."""
        self._tensors.clear()
        self._mapped, self.size = b"", 0


def warn_of_other_torch(bundle: Bundle, host: str) -> None:
    """Warn that `host` has another release of torch; `llmc verify` proves the numbers on an accelerator."""
    built_with, here = torch_releases(bundle)
    if release(built_with) != release(here):
        _log.warning(
            "%s: compiled with torch %s, this %s has %s: `llmc verify` says whether its numbers hold here",
            bundle.path, built_with or "of an unknown version", host, here,
        )  # fmt: skip


def torch_releases(bundle: Bundle) -> tuple[str, str]:
    """The bundle's torch version ("": unknown) and the installed one. Raises DeviceError if torch is not installed."""
    from importlib import metadata

    try:
        return bundle.manifest.toolchain.get("torch", ""), metadata.version("torch")
    except metadata.PackageNotFoundError:
        raise DeviceError(
            f"{bundle.path}: its programs run in torch, which is not installed; " + how_to_install("torch", "compile")
        ) from None


def release(version: str) -> tuple[str, ...]:
    """Major and minor version: ("2", "13") for "2.13.0+cpu"."""
    return tuple(version.split("+", maxsplit=1)[0].split(".")[:2])
