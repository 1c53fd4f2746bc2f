"""Memory of ONNX Runtime's sessions besides weights and cache, as benchmarks/graph_memory.py measures it.

Sessions share one arena, which grows to the largest step's size and never shrinks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from llmc.compiler.targets.calibration import LM_HEAD_BITS, calibration_costs
from llmc.compiler.targets.costs import Costs, Timing
from llmc.compiler.targets.onnxruntime.formats import panel_bits
from llmc.compiler.targets.onnxruntime.options import BF16, BLOCK, GROUP_SIZE, INT8, keeps, kept_in, ours, prompts_in
from llmc.runtime.cache_shape import SCALE_BYTES
from llmc.runtime.host import KERNELS_PROMPT_CHUNK, PROMPT_CHUNK

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llmc.buckets.bucket import Bucket
    from llmc.compiler.architectures.shared.size import ModelSize, Weights
    from llmc.compiler.options import CompileOptions

TWICE_BITS = {"q8": 9 + 9.7, "q4": 6 + 7}
"""Bits a weight of quantized blocks (formats.py), plain and packed for the kernels (benchmarks/RESULTS.md)."""

SESSION_LAYER_BYTES = {True: 100_000, False: 80_000}
"""Bytes of graph objects per layer, by whether weights are quantized."""
ARENA = 3.65
"""Arena size as a multiple of the widest layer's live values.

A factor of 2 comes from freed blocks that do not fit a later size; the rest is the block that ONNX Runtime's memory
patterns reserve from the second run of a shape on.
"""
SCRATCH = {INT8: 1.25, BF16: 2.0}
"""Scratch bytes of llmc's kernels per value of a matmul's input, by prefill precision.

The value is a quantized activation and its share of block sums, or the rounded value. They are outputs of the operator,
so all layers' scratch is kept until a step ends.
"""


def prompt_chunk(options: CompileOptions) -> int:
    """Return the chunk size in tokens of long prompts where any shape runs."""
    return KERNELS_PROMPT_CHUNK if ours(options) else PROMPT_CHUNK


class OnnxRuntimeCosts(Costs):
    """Cost estimates on a CPU."""

    graph_bytes_source: ClassVar[str] = "graph objects of each session, and the arena of the largest step, as measured"

    def cache_bytes(self, options: CompileOptions) -> int:
        """llmc's kernels keep 16 bits, or quantized values."""
        return {None: super().cache_bytes(options), INT8: 1}.get(kept_in(options), 2)

    def cache_scale_bytes(self, options: CompileOptions) -> int:
        return SCALE_BYTES if kept_in(options) == INT8 else 0

    def weight_bits(self, options: CompileOptions, weights: Weights) -> float:
        """The runtime's kernels hold quantized weights twice; their experts stay in float32."""
        if options.quantize == "none" or (weights.experts and not ours(options)):
            return super().weight_bits(options, weights)
        kept = weights.stored
        if kept is None or not keeps(str(options.quantize), kept, weights.embed_lm_head):
            four = options.quantize == "int4" and not (weights.embed_lm_head and LM_HEAD_BITS.of(options) != 4)
            if ours(options):
                return (4 if four else 8) + 16 * (1 + four) / (GROUP_SIZE.of(options) or BLOCK)
            return TWICE_BITS["q4" if four else "q8"]
        beside, block = 2 if kept.offsets else 1, min(kept.block, BLOCK)
        if ours(options):
            return panel_bits(kept) + 16 * beside / block
        return 2 * kept.bits + 32 * (beside + 2) / block

    def stage_costs(self, options: CompileOptions, buckets: Sequence[Bucket]) -> Mapping[str, Timing]:
        """llmc's kernels are built once for all models; the runtime's need packed weights."""
        more = calibration_costs(options)
        if ours(options):
            more["kernels"] = Timing(fixed=20.0)
        elif options.specialise or options.quantize != "none":
            more["pack"] = Timing(parameters=3.0)
        return {**super().stage_costs(options, buckets), **more}

    def step_tokens(self, largest: int, options: CompileOptions) -> int:
        return min(largest, prompt_chunk(options))

    def graph_bytes(self, model: ModelSize, bucket: Bucket, options: CompileOptions) -> int:
        """Graph objects, and the matrices that ONNX Runtime packs at open where the bundle has no packed copy."""
        quantised = options.quantize != "none"
        packed = 0 if quantised or options.specialise else 4 * model.parameters
        return model.layers * SESSION_LAYER_BYTES[quantised] + packed

    def workspace_bytes(self, model: ModelSize, bucket: Bucket, options: CompileOptions) -> int:
        """The arena that all sessions share; llmc's kernels fuse the operators between two matmuls."""
        if not ours(options):
            return int(ARENA * 4 * model.working_set * bucket.tokens)
        prompts = prompts_in(options) if bucket.phase == "prompt" else INT8
        taken = 2 * model.hidden + model.heads * model.head_dim + model.intermediate
        live = model.intermediate + 4 * model.hidden
        return int((4 * live + SCRATCH[prompts] * model.layers * taken) * bucket.tokens)
