"""XLA for this host's CPU: `--device xla`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from llmc.compiler.targets.costs import Cost, Verifying
from llmc.compiler.targets.hardware import Hardware
from llmc.compiler.targets.hosting import Hosting
from llmc.compiler.targets.xla.formats import CODES
from llmc.compiler.targets.xla.target import TENSOR_PARALLEL, XlaTarget
from llmc.runtime.host import host_features

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llmc.buckets.bucket import Bucket
    from llmc.compiler.architectures.shared.size import ModelSize
    from llmc.compiler.options import CompileOptions
    from llmc.compiler.targets.xla.build import Machine
    from llmc.runtime.accelerators import Cards

LAYER_BYTES = {False: 900_000, True: 1_300_000}
"""Of machine code and its description for each layer, by whether cached tokens are read."""
HELD = 2.5
"""Times the temporary buffers of the largest run: its own, and what the runs before it have not given back."""


class XlaCpuTarget(XlaTarget):
    """See the module's docstring. What its executables take of memory, benchmarks/graph_memory.py measures."""

    name: ClassVar[str] = "xla"
    hardware: ClassVar[Hardware] = Hardware(
        "x86-64 with AVX-512 (AMD EPYC)", "jax 0.10.2", "2026-11", "benchmarks/RESULTS.md"
    )
    guide: ClassVar[str] = "docs/xla.md"
    executable_seconds: ClassVar[float] = 3.0
    verifying: ClassVar[Verifying] = Verifying(
        begin=Cost(fixed=1.0), opened=Cost(layers=0.2), step=Cost(parameters=0.02), tokens=Cost(parameters=2.2)
    )
    graph_bytes_source: ClassVar[str] = "code of each executable, and the temporary buffers of the largest, as measured"

    def hosting(self, recorded: Mapping[str, Any]) -> Hosting:
        """JAX."""
        return Hosting(extra="xla")

    def cards(self) -> tuple[Cards, ...]:
        """The CPU."""
        from llmc.runtime.accelerators import CPU

        return (CPU,)

    def isa(self) -> tuple[str, ...]:
        """Native code is for this CPU."""
        return host_features()

    def machine(self, options: CompileOptions) -> Machine:
        """The CPU, as so many devices as graphs are sharded over. Raises DeviceError."""
        from llmc.compiler.targets.xla.build import host_machine

        return host_machine(TENSOR_PARALLEL.of(options), self.settings.threads)

    def graph_bytes(self, model: ModelSize, bucket: Bucket, options: CompileOptions) -> int:
        """Machine code and its description, whatever the batch: 22 times the serialised bytes."""
        return model.layers * LAYER_BYTES[bucket.context > 0]

    def workspace_bytes(self, model: ModelSize, bucket: Bucket, options: CompileOptions) -> int:
        """XLA's temporary buffers: new keys and values, the widest layer, its scores, and the cache as it is gathered.
        One run's are 0.87 to 1.05 of what memory_analysis states. Quantised weights are copied to float32 for a run."""
        copied = 4 * model.parameters if options.quantize in CODES else 0
        seen = bucket.context + bucket.query
        each = model.cache_values + model.working_set + model.heads * seen
        return copied + int(HELD * 4 * (each * bucket.tokens + bucket.batch * bucket.context * model.cache_values))
