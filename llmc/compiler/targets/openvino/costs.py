"""Memory of OpenVINO's executables on a CPU besides the cache, as benchmarks/graph_memory.py measures it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from llmc.compiler.targets.calibration import CALIBRATE, LM_HEAD_BITS, calibration_costs
from llmc.compiler.targets.costs import Costs, S, Timing
from llmc.compiler.targets.openvino.base_target import GROUP_SIZE, KV_CACHE_DTYPE, budget
from llmc.compiler.targets.openvino.precision import PAGED_INT8
from llmc.runtime.engine.batched_core import RAGGED_PREFILL_BUDGET
from llmc.runtime.executors.openvino.executor import PACKED

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from llmc.buckets.bucket import Bucket
    from llmc.compiler.architectures.shared.size import ModelSize, Weights
    from llmc.compiler.options import CompileOptions

LAYER_BYTES = 620_000
"""Bytes of graph and kernels per layer, without the packed copy of the weights."""
LIVE = {True: 1.27, False: 2.08}
"""Workspace as a multiple of the widest layer's live values, by whether weights and so matmul inputs are quantized."""


CACHE_BYTES = {"u8": 1, "bf16": 2, "f32": 4}


class OpenVinoCosts(Costs):
    """Cost estimates of OpenVINO models, on any device."""

    def __init__(self, default_group: Callable[[str], int | None]) -> None:
        self._default_group = default_group

    def stage_costs(self, options: CompileOptions, buckets: Sequence[Bucket]) -> Mapping[str, Timing]:
        return {**super().stage_costs(options, buckets), "finish": Timing(fixed=1.0, parameters=2.0)}

    def weight_bits(self, options: CompileOptions, weights: Weights) -> float:
        """Includes each group's float32 zero point, and its scale, which may have 16 bits in matmuls (finish.py)."""
        quantize = str(options.quantize)
        if quantize == "none":
            return super().weight_bits(options, weights)
        kept = weights.stored
        scale = 32 if kept is None or weights.embed_lm_head or kept.scales == "float32" else 16
        if quantize == "keep" and kept is not None:
            bits = 4 if kept.table == "float4" else kept.bits
            return bits + (scale + (32 if kept.bits == 4 or kept.offsets else 0)) / kept.block
        stored = kept is not None and kept.bits == 4
        four = quantize == "int4" and (not weights.embed_lm_head or LM_HEAD_BITS.of(options) == 4 or stored)
        requested = GROUP_SIZE.of(options)
        group = self._default_group(quantize) if requested is None else requested
        group = PAGED_INT8[0] if group is None else group
        built = 32 if CALIBRATE.of(options) is None or weights.embed_lm_head else 16
        beside = (scale if stored else built) + 32 if four else 32
        return (4 if four else 8) + (beside / group if group else 0)


class OpenVinoCpuCosts(OpenVinoCosts):
    """Cost estimates of paged models on a CPU."""

    graph_bytes_source: ClassVar[str] = "the packed copy of the weights, and the largest layer's activations of a step"

    def stage_costs(self, options: CompileOptions, buckets: Sequence[Bucket]) -> Mapping[str, Timing]:
        return {**super().stage_costs(options, buckets), **calibration_costs(options)}

    def cache_bytes(self, options: CompileOptions) -> int:
        """Of the requested precision; the parameters of u8 blocks add an eighth."""
        return CACHE_BYTES[KV_CACHE_DTYPE.of(options) or "f32"]

    def step_tokens(self, largest: int, options: CompileOptions) -> int:
        return min(largest, RAGGED_PREFILL_BUDGET)

    def graph_bytes(self, model: ModelSize, bucket: Bucket, options: CompileOptions) -> int:
        """The packed copy of the weights, which OpenVINO keeps in addition to the file, and its graph."""
        return self._packed(model, options) + model.layers * LAYER_BYTES

    def _packed(self, model: ModelSize, options: CompileOptions) -> int:
        return int(sum(weights.count * self.weight_bits(options, weights) for weights in model.weights) / 8)

    def open_at_once(self, shapes: Sequence[S], model: ModelSize, options: CompileOptions) -> Sequence[S]:
        """The executable for every shape, and as many fixed-size ones as fit the executor's memory budget."""
        every, *fixed = shapes
        return [every, *fixed[: int(budget(options) / (PACKED * self._packed(model, options)))]]

    def workspace_bytes(self, model: ModelSize, bucket: Bucket, options: CompileOptions) -> int:
        return int(LIVE[options.quantize != "none"] * 4 * model.working_set * bucket.tokens)
