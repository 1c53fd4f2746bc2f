"""NVIDIA GPUs by AOTInductor, first stage: portable programs (programs.py) that any host can compile, verify and run.

AOTInductor compiles only for the GPU of its host; `remaining` lists the on-target work of on_target.py. `--device
cuda:GPU` compiles natively without a GPU. `--device inductor:h100` names the GPU: plans are checked against its memory,
and a host with another GPU refuses to compile the bundle.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from llmc.compiler.targets.description import Hosting, contract_tested, nvidia
from llmc.compiler.targets.inductor.options import MODE, SECONDS
from llmc.compiler.targets.programs import PROGRAMS, ProgramCosts, ProgramTarget
from llmc.errors import UnknownNameError
from llmc.runtime.accelerators import NVIDIA_GPU

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llmc.buckets.bucket import Bucket
    from llmc.compiler.architectures.shared.size import ModelSize
    from llmc.compiler.options import CompileOptions
    from llmc.compiler.targets.costs import Costs
    from llmc.compiler.targets.cuda.gpus import GpuSpec
    from llmc.compiler.targets.on_target import OnTargetCompiler
    from llmc.settings import Settings

GRAPH_BYTES = 28 << 20


class InductorCosts(ProgramCosts):
    """Costs of captured CUDA graphs on `gpu`, None for any."""

    device_seconds: ClassVar[float] = 135.0
    device_source: ClassVar[str] = "40 to 230 s a bucket of SmolLM2-135M on two CPU cores, torch 2.13; without a GPU"
    graph_bytes_source: ClassVar[str] = (
        "6 to 28 MiB for a captured CUDA graph in vLLM's log (vllm-project/vllm#22897), and the values of one step, "
        "which all graphs share"
    )

    def __init__(self, gpu: GpuSpec | None) -> None:
        self._gpu = gpu

    def memory(self, options: CompileOptions) -> tuple[int, str] | None:
        """Of the named GPU; unknown where the on-target host decides."""
        return None if self._gpu is None else (self._gpu.memory_bytes, f"of {self._gpu.product}")

    def graph_bytes(self, model: ModelSize, bucket: Bucket, options: CompileOptions) -> int:
        return GRAPH_BYTES

    def workspace_bytes(self, model: ModelSize, bucket: Bucket, options: CompileOptions) -> int:
        """The pool that captured graphs share: live values, gathered pasts and recurrent states of a step, and the
        logits.
        """
        values = model.working_set * bucket.tokens + model.cache_values * bucket.batch * bucket.context
        size = self.cache_bytes(options)
        return size * (values + model.vocabulary * bucket.batch) + bucket.batch * model.state_bytes(size)


class InductorTarget(ProgramTarget):
    """`--device inductor[:CARD]`."""

    description = replace(
        PROGRAMS,
        name="inductor",
        executor="inductor",
        options=(MODE, SECONDS),
        why_static="CUDA graphs are captured and replayed at fixed shapes",
        guide="docs/cuda.md",
        accelerators=(NVIDIA_GPU,),
        hardware=contract_tested("programs and AOTInductor packages were run on CPU"),
    )

    def __init__(self, gpu: GpuSpec | None = None) -> None:
        super().__init__()
        self._gpu = gpu

    @classmethod
    def of(cls, detail: str, settings: Settings) -> Self:
        from llmc.compiler.targets.cuda.gpus import NAMES, gpu_of  # no portable program's key has it

        gpu = gpu_of(detail)
        if detail and gpu is None:
            raise UnknownNameError("GPU", detail, NAMES)
        return cls(gpu)

    @property
    def costs(self) -> Costs:
        return InductorCosts(self._gpu)

    def remaining(self) -> str:
        return (
            "on a host with an NVIDIA GPU and torch 2.11 to 2.13 for CUDA: AOTInductor has to compile each program, "
            "and a CUDA graph of it is captured at each start"
        )

    def on_target(self) -> OnTargetCompiler:
        """AOTInductor, imported here to keep it out of portable programs' keys."""
        from llmc.compiler.targets.inductor.on_target import PackageCompiler

        return PackageCompiler(self._gpu)

    def hosting(self, recorded: Mapping[str, Any]) -> Hosting:
        return nvidia(1, "compile", "" if self._gpu is None else self._gpu.product)
