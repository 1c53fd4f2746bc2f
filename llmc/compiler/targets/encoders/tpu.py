"""Encoders for TPUs that are only described: `--device tpu:v5e-1x1`. Nothing is run on one: verification runs the
portable programs of the same executables on this host's CPU."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar

from llmc.compiler.targets.encoders.xla import XlaEncoderTarget
from llmc.compiler.targets.xla.capacity import Need, gib
from llmc.compiler.targets.xla.described import DescribedTarget
from llmc.compiler.weights.weightless import ITEM_BYTES, PLACEMENTS
from llmc.errors import CompileError

if TYPE_CHECKING:
    from llmc.compiler.options import CompileOptions
    from llmc.compiler.stages import Stages
    from llmc.compiler.targets.encoders.base import Made


class TpuEncoderTarget(XlaEncoderTarget):
    """See the module's docstring."""

    name: ClassVar[str] = "tpu"
    packages: ClassVar[tuple[str, ...]] = ("jax", "libtpu")

    def analyse(self, stages: Stages, made: Made, options: CompileOptions) -> dict[str, Any]:
        """And what a device must hold; raises CompileError where it has less."""
        found = super().analyse(stages, made, options)
        assert isinstance(self.compiler, DescribedTarget)
        topology = self.compiler.topology
        places = json.loads(stages.store.get_bytes(made.files[PLACEMENTS])).values()
        weights = sum(topology.array_bytes(at["shape"], ITEM_BYTES[at["dtype"]]) for at in places)
        need = Need.of(weights, 0, [e["memory"] for e in found["executables"]])
        if need.total > topology.usable_bytes:
            raise CompileError(
                f"does not fit {topology.name} by {gib(need.total - topology.usable_bytes)} a {topology.unit}: {need}; "
                f"a {topology.unit} has {gib(topology.usable_bytes)} for programs; lower --max-num-seqs or "
                f"--max-model-len, or choose {topology.larger}"
            )
        memory = {**asdict(need), "total": need.total, "available": topology.usable_bytes}
        return {"topology": topology.name, "device_memory": memory, **found}
