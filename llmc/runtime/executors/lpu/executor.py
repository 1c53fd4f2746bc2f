"""LPUs: HyperDex's runtime generates on the device; llmc queues requests, ends them and decodes the text.

With NUM_GPU_DEVICES, GPUs prefill and the LPUs decode. This is HyperDex's own disaggregated mode, which transfers KV by
itself (Hyper-Accel/docs, docs/huggingface_api.md at b0ba3ab).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, ClassVar

from llmc.artifacts.temporaries import temporary_folder
from llmc.errors import ArtifactError, DeviceError
from llmc.runtime.executors.base import EXECUTABLES, ExecutorDescription
from llmc.runtime.executors.compatibility import require_version
from llmc.runtime.executors.generating import GeneratingExecutor, Sampling
from llmc.runtime.executors.lpu.hyperdex import MODEL, PACKAGE, Artifact, HyperDex, find_hyperdex

if TYPE_CHECKING:
    from llmc.runtime.bundle import Bundle

_GREEDY_BELOW = 1e-5
OPEN_S = 1800.0
"""Seconds after which loading a model counts as hung."""


class LpuExecutor(GeneratingExecutor):
    """One model, compiled for a number of LPUs and one max_length, running one sequence at a time.

    Parameters and their defaults are those of HyperAccel's vLLM guide ("Option for Sampling Params").
    """

    description: ClassVar[ExecutorDescription] = ExecutorDescription({EXECUTABLES: "code"})
    parameters: ClassVar[tuple[str, ...]] = ("top_p", "top_k", "temperature", "repetition_penalty")
    defaults: ClassVar[Sampling] = {"top_p": 0.7, "top_k": 1, "temperature": 1.0, "repetition_penalty": 1.2}
    takes: ClassVar[str] = "the sampling parameters of an LPU (HyperAccel's vLLM guide)"

    def __init__(self, bundle: Bundle, slots: int, capacity: int, threads: int) -> None:
        artifact = Artifact.of(bundle)
        super().__init__(bundle, slots, artifact.max_length, threads)
        self._seconds = bundle.settings.hyperdex_seconds
        self._artifact = artifact
        self._hyperdex: HyperDex | None = None
        with ExitStack() as stack:
            folder = stack.enter_context(temporary_folder("lpu")) / MODEL
            folder.mkdir(parents=True)
            artifact.lay_out(bundle, folder)
            self._folder = folder
            self._open()
            self._opened = stack.pop_all()

    def _open(self) -> HyperDex:
        if self._hyperdex is None:
            settings = self.bundle.settings
            hyperdex = HyperDex(find_hyperdex(settings), DeviceError)
            try:
                devices = {"gpus": settings.num_gpu_devices, "lpus": self._artifact.devices}
                hyperdex.ask("open", OPEN_S, model=str(self._folder), **devices)
            except BaseException:
                hyperdex.kill()
                hyperdex.close()
                raise
            self._hyperdex = hyperdex
            self.compilations.loaded(self.executable)
        return self._hyperdex

    @classmethod
    def check(cls, bundle: Bundle) -> None:
        settings = bundle.settings
        artifact = Artifact.of(bundle)
        require_version(bundle, PACKAGE, find_hyperdex(settings).version, "HyperDex")
        wanted = settings.num_lpu_devices
        if wanted not in (None, artifact.devices):
            raise ArtifactError(
                f"{bundle.path}: compiled for {artifact.devices} LPUs, but NUM_LPU_DEVICES is {wanted}; set that to "
                f"{artifact.devices}, or compile with --device lpu:{wanted}"
            )
        if settings.num_gpu_devices and artifact.low_memory_usage:
            raise ArtifactError(
                f"{bundle.path}: compiled with --low-memory-usage, without the weights that GPUs need "
                f"(NUM_GPU_DEVICES is {settings.num_gpu_devices}); compile without it: {bundle.recompile_hint}"
            )

    def generate(self, prompt: Sequence[int], most: int, sampling: Sampling) -> Generator[int, None, None]:
        hyperdex = self._open()
        try:
            hyperdex.ask("begin", self._seconds, prompt=list(prompt), arguments=self._arguments(most, sampling))
            for _ in range(most):
                token = hyperdex.ask("next", self._seconds)["token"]
                if token is None:
                    break
                try:
                    yield token
                except GeneratorExit:
                    break
            hyperdex.ask("end", self._seconds)
        except DeviceError:
            self._end(kill=True)
            raise

    def _arguments(self, most: int, sampling: Sampling) -> dict[str, Any]:
        """Arguments of generate_yield. HyperDex is greedy without do_sample, and top_k has no value for "all"."""
        greedy = sampling["temperature"] < _GREEDY_BELOW
        return {
            **sampling,
            "max_new_tokens": most,
            "do_sample": not greedy,
            "temperature": 1.0 if greedy else sampling["temperature"],
            "top_k": sampling["top_k"] or self._vocab_size,
        }

    def _end(self, kill: bool) -> None:
        hyperdex, self._hyperdex = self._hyperdex, None
        if hyperdex is not None:
            if kill:
                hyperdex.kill()
            hyperdex.close()

    def memory(self) -> dict[str, int]:
        """Bytes of the artifact. HyperDex does not report the devices' memory."""
        sizes = self.bundle.manifest
        return {"executables": sum(sizes.blobs[sizes.files[name]] for name in self._artifact.files.values())}

    def open_all(self) -> None:
        """The model is open."""

    def close(self) -> None:
        self._end(kill=False)
        self._opened.close()
