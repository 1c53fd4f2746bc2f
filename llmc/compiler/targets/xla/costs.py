"""Disk and memory estimates of XLA's executables. benchmarks/graph_memory.py measures those of the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from llmc.compiler.targets.costs import WEIGHTS, Costs, Timing, Verifying, traces
from llmc.compiler.targets.xla.formats import KV_CACHES, QUANTIZED_DTYPES, cache_dtype
from llmc.compiler.targets.xla.target import TENSOR_PARALLEL
from llmc.compiler.weights.stage import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llmc.buckets.bucket import Bucket
    from llmc.compiler.architectures.shared.size import ModelSize, Weights
    from llmc.compiler.options import CompileOptions
    from llmc.compiler.targets.xla.capacity import DescribedMachine

LAYER_BYTES = {False: 900_000, True: 1_300_000}
"""Bytes of machine code and its description per layer, by whether cached tokens are read."""
HELD = 2.5
"""Memory as a multiple of the largest run's temporary buffers: its own, and what earlier runs have not released."""


class XlaCosts(Costs):
    """Common cost estimates of XLA's devices."""

    executable_bytes: ClassVar[int] = 1_000_000
    splits_weights: ClassVar[tuple[str, ...]] = (TENSOR_PARALLEL.flag,)

    def stage_costs(self, options: CompileOptions, buckets: Sequence[Bucket]) -> Mapping[str, Timing]:
        return {"trace": traces(buckets), "weights": WEIGHTS, "slots": Timing(fixed=1.0)}

    def weight_bits(self, options: CompileOptions, weights: Weights) -> float:
        """8 where they are quantized, which experts are not; row scales add a hundredth or less."""
        return (
            8.0
            if options.quantize in QUANTIZED_DTYPES and not weights.experts
            else super().weight_bits(options, weights)
        )

    def cache_bytes(self, options: CompileOptions) -> int:
        return ITEM_BYTES[KV_CACHES[cache_dtype(options)]]

    def devices(self, options: CompileOptions) -> int:
        return TENSOR_PARALLEL.of(options)


class XlaCpuCosts(XlaCosts):
    """Cost estimates on this host's CPU."""

    executable_seconds: ClassVar[float] = 3.0
    verifying: ClassVar[Verifying] = Verifying(
        begin=Timing(fixed=1.0),
        opened=Timing(layers=0.2),
        step=Timing(parameters=0.02),
        tokens=Timing(parameters=2.2),
    )
    graph_bytes_source: ClassVar[str] = "code of each executable, and the temporary buffers of the largest, as measured"

    def graph_bytes(self, model: ModelSize, bucket: Bucket, options: CompileOptions) -> int:
        """Machine code and its description, whatever the batch: 22 times the serialised bytes."""
        return model.layers * LAYER_BYTES[bucket.context > 0]

    def workspace_bytes(self, model: ModelSize, bucket: Bucket, options: CompileOptions) -> int:
        """XLA's temporary buffers: new keys and values, the widest layer, its scores, and the gathered cache.

        A run's buffers are 0.87 to 1.05 times what memory_analysis states. Quantized weights are copied to float32 for
        a run.
        """
        copied = 4 * model.parameters if options.quantize in QUANTIZED_DTYPES else 0
        seen = bucket.context + bucket.query
        each = model.cache_values + model.working_set + model.heads * seen
        return copied + int(HELD * 4 * (each * bucket.tokens + bucket.batch * bucket.context * model.cache_values))


class DescribedCosts(XlaCosts):
    """Cost estimates for a described machine. Verification compiles each program for this CPU first."""

    verifying: ClassVar[Verifying] = Verifying(
        begin=Timing(fixed=1.0),
        opened=Timing(fixed=1.5),
        step=Timing(parameters=0.02),
        tokens=Timing(parameters=2.2),
    )

    def __init__(self, topology: DescribedMachine) -> None:
        self._topology = topology

    def memory(self, options: CompileOptions) -> tuple[int, str] | None:
        devices = TENSOR_PARALLEL.of(options)
        return devices * self._topology.usable_bytes, f"of {devices} of the devices of {self._topology.name}"


class CudaCosts(DescribedCosts):
    """Cost estimates for NVIDIA GPUs."""

    executable_seconds: ClassVar[float] = 8.0
    executable_bytes: ClassVar[int] = 1_400_000


class TpuCosts(DescribedCosts):
    """Cost estimates for TPUs."""

    executable_seconds: ClassVar[float] = 4.0
