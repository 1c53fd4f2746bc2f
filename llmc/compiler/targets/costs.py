"""Cost estimates of a bundle: seconds of each compile stage by model size, and bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar

if TYPE_CHECKING:
    from llmc.buckets.bucket import Bucket
    from llmc.compiler.architectures.shared.size import ModelSize, Weights
    from llmc.compiler.options import CompileOptions

S = TypeVar("S")
PARAMETERS, LAYERS = 134_515_008, 30
"""Parameters and layers of SmolLM2-135M, on which the costs were measured."""
DTYPE_BITS = {"f32": 32, "bf16": 16, "f16": 16}


@dataclass(frozen=True)
class Timing:
    """Seconds: a fixed part, a part per layer, and a part for SmolLM2-135M's number of parameters."""

    fixed: float = 0.0
    layers: float = 0.0
    parameters: float = 0.0

    def of(self, layers: int, parameters: int) -> float:
        return self.fixed + self.layers * layers / LAYERS + self.parameters * parameters / PARAMETERS


TRACE = Timing(fixed=3.0, layers=1.0)
"""One trace in dialect fused. A few layers are traced and the others derived from them."""

EXPORT = Timing(fixed=3.5, layers=2.5)
"""One trace in dialect two_part, and writing its program layer by layer."""

LOWER = Timing(fixed=1.0, layers=3.0)
REFERENCE = Timing(fixed=2.0, parameters=12.0)
WEIGHTS = Timing(parameters=2.5)


@dataclass(frozen=True)
class Verifying:
    """Seconds of verification: to begin, per opened executable, per step and per 1,000 prompt tokens."""

    begin: Timing
    opened: Timing
    step: Timing
    tokens: Timing


def traces(buckets: Sequence[Bucket]) -> Timing:
    """Return the cost of the traces, with and without a cache, that buckets need."""
    times = len({bucket.context > 0 for bucket in buckets})
    return Timing(fixed=times * EXPORT.fixed, layers=times * EXPORT.layers)


class Costs:
    """Estimates of a device's costs before compilation (estimates/). `options` are configured."""

    executable_seconds: ClassVar[float] = 0.25
    """Seconds for one more executable on this host, used until the store has a build of one."""
    executable_source: ClassVar[str] = "SmolLM2-135M on two cores (benchmarks/RESULTS.md)"
    device_seconds: ClassVar[float] = 0.0
    """Seconds that on-target compilation needs per portable executable, by published measurements."""
    device_source: ClassVar[str] = ""
    verifying: ClassVar[Verifying] = Verifying(
        begin=Timing(fixed=0.5),
        opened=Timing(layers=0.15),
        step=Timing(parameters=0.01),
        tokens=Timing(parameters=1.1),
    )
    """Verification times on two cores, used until the store has a measurement."""
    executable_bytes: ClassVar[int] = 150_000
    """Approximate bytes of an executable on disk, without weights."""
    graph_bytes_source: ClassVar[str] = "the activations of the largest layer for every token of the bucket"
    splits_weights: ClassVar[tuple[str, ...]] = ()
    """Flags that divide the weights over several devices."""

    def stage_costs(self, options: CompileOptions, buckets: Sequence[Bucket]) -> Mapping[str, Timing]:
        """Return the seconds on two cores of each stage that executables share, by kind."""
        return {"trace": TRACE, "lower": LOWER, "weights": WEIGHTS}

    def memory(self, options: CompileOptions) -> tuple[int, str] | None:
        """Return the bytes of memory for weights, cache and graphs, and the device's name; None if unknown."""
        from llmc.runtime.host import host_memory

        found = host_memory()
        return None if found is None else (found, "of this host")

    def weight_bits(self, options: CompileOptions, weights: Weights) -> float:
        """Return the bits that a bundle holds per weight, including scales and the kernels' copies."""
        return DTYPE_BITS[options.dtype]

    def cache_bytes(self, options: CompileOptions) -> int:
        """Return the bytes of one value in the KV cache."""
        return DTYPE_BITS[options.dtype] // 8

    def cache_scale_bytes(self, options: CompileOptions) -> int:
        """Return the bytes of each head's scale for one token's key or value; 0 without scales."""
        return 0

    def devices(self, options: CompileOptions) -> int:
        return 1

    def step_tokens(self, largest: int, options: CompileOptions) -> int:
        """Return the new tokens of the largest step of an any-shape executable; `largest` is the largest bucket's."""
        return largest

    def graph_bytes(self, model: ModelSize, bucket: Bucket, options: CompileOptions) -> int:
        """Return the bytes that one open executable keeps, without weights and cache; `bucket` is its largest step."""
        return 4 * model.working_set * bucket.tokens

    def workspace_bytes(self, model: ModelSize, bucket: Bucket, options: CompileOptions) -> int:
        """Return the bytes that a step takes of the memory that all executables share; the largest step counts."""
        return 0

    def open_at_once(self, shapes: Sequence[S], model: ModelSize, options: CompileOptions) -> Sequence[S]:
        """Return the shapes whose executables are open at the same time."""
        return shapes
