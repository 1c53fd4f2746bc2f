"""Portable programs on an NVIDIA GPU: as CUDA graphs, compiled, or eagerly (`InductorMode`).

A step is one graph of fixed shapes (executors/whole_step), with inputs and outputs at fixed addresses (cuda.py). The
host fetches only the top logits if a request samples from them; other outputs stay on the GPU until needed.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from llmc.runtime.executors.base import EXECUTABLES, ExecutorDescription
from llmc.runtime.executors.inductor import cuda, toolchain
from llmc.runtime.executors.inductor.cuda import CudaAccelerator, StaticInputs, StaticOutputs
from llmc.runtime.executors.inductor.package import FORM, Package, sizes_of
from llmc.runtime.executors.torch.executor import (
    Array,
    OpenedProgram,
    TorchExecutor,
    ordered,
    settled,
    warn_of_other_torch,
)
from llmc.runtime.executors.whole_step.executor import AcceleratorExecutor, AcceleratorGraphs, step_of
from llmc.runtime.executors.whole_step.step import Run, cache_arrays, flat_step, step_program, whole_graph
from llmc.runtime.nvidia import Needs, gpus, require_gpu
from llmc.runtime.top_logits import TopLogits, top_of

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest import Executable
    from llmc.buckets.bucket import Bucket
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.executors.compilations import CompilationCounter
    from llmc.runtime.step import Step
    from llmc.settings import Settings


_log = logging.getLogger("llmc")


@contextmanager
def watched(counter: CompilationCounter, what: str) -> Iterator[None]:
    """Count what torch.compile compiles inside the block as `what`'s (torch 2.11 to 2.13, torch/_dynamo/utils.py)."""
    before = _graphs()
    yield
    for _ in range(_graphs() - before):
        counter.opened(f"torch.compile: {what}")


def _graphs() -> int:
    module = sys.modules.get("torch._dynamo.utils")
    return 0 if module is None else int(module.counters["stats"]["unique_graphs"])


PIECE = 2 << 20
"""CUDA's allocation granularity in bytes (cuMemGetAllocationGranularity of NVIDIA GPUs, CUDA 12 and 13). It is the
expected size of the graph with the most operators, before one of its phase was measured.
"""

LOGITS, VALUES, IDS, TIED = range(4)
"""A step's outputs: logits [B, V]; if programs return them, the top [B, K], and how many logits of a row are no less
than the last of its top [B].
"""


@dataclass(frozen=True)
class InductorMode:
    """How an NVIDIA GPU runs a step, by --enforce-eager and LLMC_CUDA_GRAPHS.

        eager   graphs   mode
        no      yes      CUDA graphs: packages, or compiled programs, captured under the memory budget; today's default
        no      no       torch.compile: the same, launched kernel by kernel
        yes     any      PyTorch eager mode: operator by operator

    A bundle compiled on its target has a package for each bucket (package.py). For other bundles torch.compile builds a
    graph for each bucket at the start, which is counted.
    """

    eager: bool
    graphs: bool

    @classmethod
    def of(cls, settings: Settings) -> InductorMode:
        return cls(settings.enforce_eager, settings.cuda_graphs)

    @property
    def captures(self) -> bool:
        return self.graphs and not self.eager

    def __str__(self) -> str:
        if self.eager:
            return "PyTorch eager mode"
        return "CUDA graphs" if self.captures else "torch.compile"


class CudaGraphs(AcceleratorGraphs):
    """The GPU as a device that captures graphs (buckets/capture/device.py), in CUDA graph mode.

    The profile run makes the pool as large as the largest prompt and decode buckets need. A graph therefore adds only
    what CUDA holds for its kernels, in proportion to its operators, whatever its number of tokens.
    """

    graphs: ClassVar[str] = "CUDAGraphs"
    kind: ClassVar[str] = "GPU"

    _executor: InductorOnDevice
    _accelerator: CudaAccelerator

    def expected(self, bucket: Bucket) -> int:
        return -(-PIECE * self._executor.operators(bucket) // self._most)

    @cached_property
    def _most(self) -> int:
        return max(map(self._executor.operators, self._executor.bundle.plan.buckets))

    def run(self, bucket: Bucket) -> None:
        """Run the bucket, and the decode bucket that reads most, over a temporary cache of one sequence."""
        decode = max(self._executor.bundle.plan.decode, key=lambda b: (b.batch * b.context, b.batch))
        self._cache.make(1)
        try:
            for one in (bucket, decode):
                self._executor.run(step_of(one))
        finally:
            self._cache.drop()
            self._accelerator.give_back()


class InductorExecutor(TorchExecutor):
    """Runs on the CPU; on a host with a GPU the constructor returns `InductorOnDevice` instead."""

    description: ClassVar[ExecutorDescription] = replace(
        TorchExecutor.description, opens={**TorchExecutor.description.opens, EXECUTABLES: "by first bytes"},
        host=toolchain.host,
    )  # fmt: skip

    _stands_for: ClassVar[str] = "NVIDIA GPU"

    @classmethod
    def check(cls, bundle: Bundle) -> None:
        """Check as torch's executor does on a CPU; on a GPU, torch may be of another release than the bundle's.

        Raises DeviceError for an old driver, and OutOfDeviceMemoryError if weights and the cache of one sequence do not
        fit.
        """
        found = () if bundle.settings.open_portable else gpus()
        built = cuda.cuda_version()
        if found and built is not None:
            require_gpu(str(bundle.path), Needs(cuda=int(built.split(".")[0]), memory=_memory(bundle)), found)
        elif found:
            _log.warning(
                "%s: this host has %s, but its torch was built without CUDA: install one with CUDA",
                bundle.path,
                found[0],
            )
        if cuda.is_available():
            warn_of_other_torch(bundle, "host")
        else:
            super().check(bundle)

    def _program(self, executable: Executable, data: bytes) -> bytes:
        if not data.startswith(FORM.magic[:-1]):
            return data
        self.bundle.files.require_native(str(executable))
        package = Package.parse(data, self._source(executable))
        self._keep_package(executable, package)
        return bytes(package.program)

    def _keep_package(self, executable: Executable, package: Package) -> None:
        """Only a GPU runs packages."""

    def _source(self, executable: Executable) -> str:
        return f"{self.bundle.path}: {executable}"

    def __new__(cls, bundle: Bundle, *_: object) -> InductorExecutor:
        on_device = not bundle.settings.open_portable and cuda.is_available()
        created: InductorExecutor = object.__new__(InductorOnDevice if on_device else InductorExecutor)
        if isinstance(created, InductorOnDevice):
            created.accelerator, created.mode = CudaAccelerator(), InductorMode.of(bundle.settings)
        return created


class InductorOnDevice(AcceleratorExecutor, InductorExecutor):
    """Runs on the GPU."""

    _stands_for: ClassVar[str] = ""
    accelerator: CudaAccelerator
    mode: InductorMode
    _graph_device: ClassVar[type[AcceleratorGraphs]] = CudaGraphs

    def __init__(self, bundle: Bundle, slots: int, capacity: int, threads: int) -> None:
        self._packages: dict[str, Run] = {}
        super().__init__(bundle, slots, capacity, threads)
        self._inputs = StaticInputs(self.accelerator, bundle.plan, self._cache.lengths)
        self._results = StaticOutputs(self.accelerator, max(bucket.batch for bucket in bundle.plan.buckets))
        self._ran: set[str] = set()
        self._fresh: tuple[int, int] | None = None
        """Live rows and rows of a step whose logits were not fetched yet."""

    def _watched(self, what: str) -> AbstractContextManager[None]:
        return watched(self.compilations, what)

    def operators(self, bucket: Bucket) -> int:
        executable = self.bundle.executable(bucket.phase, bucket.batch, bucket.query, bucket.context)
        return self._open(executable).program.operators

    def _keep_package(self, executable: Executable, package: Package) -> None:
        if self.mode.eager:
            return
        source = self._source(executable)
        package.require_here(toolchain.host(), source)
        sizes, arrays = sizes_of(executable, self.capacity), cache_arrays(self.bundle, self.capacity)
        package.require_sizes(sizes, arrays, source)
        self._packages[executable.blob] = package.open(source, self.accelerator.device)

    def _run_of(self, executable: Executable, opened: OpenedProgram) -> Run:
        """The package; without one or in eager mode, the program, compiled by its first call unless eager."""
        if (package := self._packages.pop(executable.blob, None)) is not None:
            return step_program(package, opened.weights, self._cache)
        flat = flat_step(opened.program, executable.context or 0, self._cache.arrays)
        run = step_program(flat, opened.weights, self._cache)
        return run if self.mode.eager else whole_graph(run)

    def _computed(self, executable: Executable, given: Sequence[Any]) -> list[Any]:
        found = list(self._runs[executable.blob](*given))
        self._require_logits(found[LOGITS].shape[-1])
        if k := self.bundle.sample_top_k:
            found.append((found[LOGITS].float() >= found[VALUES].narrow(-1, k - 1, 1).float()).sum(-1))
        return found

    def _replay(self, step: Step, opened: OpenedProgram) -> list[Any]:
        del opened  # with its cache and in its mode, see _run_of
        self._logits, self._fresh = None, (len(step.slots), step.batch)
        if not step.slots:
            return []
        self.require_cache()
        executable = self._executable(step)
        with self._watched(str(executable)), self.accelerator.guarded():
            given = self._inputs.put(step)
            if (graph := self._graphs.get(executable.blob)) is not None:
                graph.replay()
                return []
            with self.accelerator.in_pool():
                found = self._computed(executable, given)
            self._results.make(found)
            self._results.keep(found)
        self._ran.add(executable.blob)
        return []

    def _captured(self, executable: Executable, step: Step) -> Any:
        if executable.blob not in self._ran:
            self._replay(step, self._open(executable))
            self._fresh = None
        given = self._inputs.put(step)
        return self.accelerator.capture(lambda: self._results.keep(self._computed(executable, given)))

    def run(self, step: Step) -> Array:
        self._run(step)
        return self.logits()

    def run_top(self, step: Step) -> TopLogits:
        """Run a step. Only top logits are copied to the host, unless others equal the last of them."""
        k = self._require_top()
        self._run(step)
        live, batch = len(step.slots), step.batch
        if not live:
            return top_of(self.logits(), k)
        values, ids, tied = self._results.fetch((VALUES, IDS, TIED), live, batch)
        found = ordered(values.float().numpy(), ids.numpy())
        equal = np.flatnonzero(tied[:live].numpy() > k)
        return settled(found, equal, self.logits()[equal]) if len(equal) else found

    def logits(self) -> Array:
        if self._fresh is not None:
            (live, batch), self._fresh = self._fresh, None
            if live:
                (found,) = self._results.fetch((LOGITS,), live, batch)
                self._keep(found.float().numpy())
            else:
                self._keep(np.zeros((batch, self._vocabulary), np.float32))
        return super().logits()

    def close(self) -> None:
        super().close()
        self._inputs.drop()
        self._results.drop()
        self.accelerator.close()


def _memory(bundle: Bundle) -> Mapping[str, int]:
    """The least memory for serving, in bytes: weights, and the cache of one sequence in bf16 or f32."""
    cache = cache_arrays(bundle, bundle.plan.limits.max_model_len)
    weights = bundle.manifest.files.get("weights", "")
    return {
        "weights": bundle.manifest.blobs.get(weights, 0),
        "the cache of one sequence": sum(array.slot_bytes for array in cache),
    }
