"""What a bundle for a device costs: seconds of a compile's parts by the model's size, and bytes."""

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
"""Of SmolLM2-135M, on which the costs were measured."""
DTYPE_BITS = {"f32": 32, "bf16": 16, "f16": 16}


@dataclass(frozen=True)
class Timing:
    """Seconds: a fixed part, a part for each layer, and a part for SmolLM2-135M's number of parameters."""

    fixed: float = 0.0
    layers: float = 0.0
    parameters: float = 0.0

    def of(self, layers: int, parameters: int) -> float:
        """For a model of such a size."""
        return self.fixed + self.layers * layers / LAYERS + self.parameters * parameters / PARAMETERS


TRACE = Timing(fixed=3.0, layers=1.0)
"""One trace in dialect fused. Few layers are traced; the others are made from these, and put into the graph."""

EXPORT = Timing(fixed=3.5, layers=2.5)
"""One trace in dialect two_part, and the writing of its program, layer by layer."""

LOWER = Timing(fixed=1.0, layers=3.0)
REFERENCE = Timing(fixed=2.0, parameters=12.0)
WEIGHTS = Timing(parameters=2.5)


@dataclass(frozen=True)
class Verifying:
    """Times of verification: a fixed part, each executable it opens, each step, and each 1,000 tokens of prompts
    (estimates/durations.py counts them)."""

    begin: Timing
    opened: Timing
    step: Timing
    tokens: Timing


def traces(buckets: Sequence[Bucket]) -> Timing:
    """Traces without and with a cache, as buckets need them."""
    times = len({bucket.context > 0 for bucket in buckets})
    return Timing(fixed=times * EXPORT.fixed, layers=times * EXPORT.layers)


class Costs:
    """A device's costs before anything is compiled (estimates/). `options` are configured."""

    executable_seconds: ClassVar[float] = 0.25
    """Seconds for one more executable on this host, used while the store has no build of one."""
    executable_source: ClassVar[str] = "SmolLM2-135M on two cores (benchmarks/RESULTS.md)"
    device_seconds: ClassVar[float] = 0.0
    """Seconds that the device's own host still needs for each portable executable, by published measurements."""
    device_source: ClassVar[str] = ""
    verifying: ClassVar[Verifying] = Verifying(
        begin=Timing(fixed=0.5),
        opened=Timing(layers=0.15),
        step=Timing(parameters=0.01),
        tokens=Timing(parameters=1.1),
    )
    """Times of verification on two cores, used while the store has no measurement."""
    executable_bytes: ClassVar[int] = 150_000
    """About what an executable takes on disk, weights not counted."""
    graph_bytes_source: ClassVar[str] = "the activations of the largest layer for every token of the bucket"
    splits_weights: ClassVar[tuple[str, ...]] = ()
    """Flags that divide the weights over several devices."""

    def stage_costs(self, options: CompileOptions, buckets: Sequence[Bucket]) -> Mapping[str, Timing]:
        """Times on two cores of the stages that executables share, by kind."""
        return {"trace": TRACE, "lower": LOWER, "weights": WEIGHTS}

    def memory(self, options: CompileOptions) -> tuple[int, str] | None:
        """The memory in bytes for weights, cache and graphs, and the name of the device that has it; None: unknown."""
        from llmc.runtime.host import host_memory

        found = host_memory()
        return None if found is None else (found, "of this host")

    def weight_bits(self, options: CompileOptions, weights: Weights) -> float:
        """Bits that a bundle holds for each of such weights, scales and copies for the kernels included."""
        return DTYPE_BITS[options.dtype]

    def cache_bytes(self, options: CompileOptions) -> int:
        """Bytes of one value in the KV cache."""
        return DTYPE_BITS[options.dtype] // 8

    def cache_scale_bytes(self, options: CompileOptions) -> int:
        """Bytes of each head's scale for a key or value of a token, where the cache has scales."""
        return 0

    def devices(self, options: CompileOptions) -> int:
        """How many devices one graph is sharded over."""
        return 1

    def step_tokens(self, largest: int, options: CompileOptions) -> int:
        """New tokens of the largest step that an executable for every shape runs; `largest` is the largest bucket's."""
        return largest

    def graph_bytes(self, model: ModelSize, bucket: Bucket, options: CompileOptions) -> int:
        """Bytes that one open executable keeps, weights and cache not counted; `bucket` is the largest step it runs."""
        return 4 * model.working_set * bucket.tokens

    def workspace_bytes(self, model: ModelSize, bucket: Bucket, options: CompileOptions) -> int:
        """Bytes that such a step takes of a memory that all executables share: of several, the most counts."""
        return 0

    def open_at_once(self, shapes: Sequence[S], model: ModelSize, options: CompileOptions) -> Sequence[S]:
        """Those of a bundle's shapes whose executables are open at the same time."""
        return shapes
