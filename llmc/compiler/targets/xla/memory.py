"""What XLA's executables take on a CPU beside weights and cache, as benchmarks/graph_memory.py measures it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from llmc.compiler.targets.base import StaticTarget

if TYPE_CHECKING:
    from llmc.buckets.bucket import Bucket
    from llmc.compiler.architectures.shared.size import ModelSize
    from llmc.compiler.options import CompileOptions

LAYER_BYTES = {False: 900_000, True: 1_300_000}
"""Of machine code and its description for each layer, by whether cached tokens are read."""
HELD = 2.5
"""Times the temporary buffers of the largest run: its own, and what the runs before it have not given back."""


class XlaMemory(StaticTarget):
    """The part of a target that says what memory its executables take on a CPU."""

    graph_bytes_source: ClassVar[str] = "code of each executable, and the temporary buffers of the largest, as measured"

    def graph_bytes(self, model: ModelSize, bucket: Bucket, options: CompileOptions) -> int:
        """Machine code and its description, whatever the batch: 22 times the serialised bytes."""
        return model.layers * LAYER_BYTES[bucket.context > 0]

    def workspace_bytes(self, model: ModelSize, bucket: Bucket, options: CompileOptions) -> int:
        """XLA's temporary buffers: new keys and values, the widest layer, its scores, and the cache as it is gathered.
        One run's are 0.87 to 1.05 of what memory_analysis states."""
        seen = bucket.context + bucket.query
        each = model.cache_values + model.working_set + model.heads * seen
        return int(HELD * 4 * (each * bucket.tokens + bucket.batch * bucket.context * model.cache_values))
