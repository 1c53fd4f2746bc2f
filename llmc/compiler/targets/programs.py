"""Targets whose portable form is one torch.export program per bucket, which the device's compiler takes and CPUs run.

A compile never claims a native executable. It fixes the plan, each bucket's graph at its fixed shape, and the weights
in the device's form, and it verifies the numbers with a NaN fill of the unused cache.

Programs take their weights as inputs (dialect two_part: the cache is read-only, new keys and values come out), so that
all buckets share one weights file (weightless.py), and a graph is some tens of kilobytes. The model is traced twice,
without and with a cache, with symbolic sizes. Specialising a bucket from that takes well under a second
(program/to_export.py), so parallel jobs would gain nothing from processes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from llmc.artifacts.digest import digest_bytes
from llmc.artifacts.key import canonical_json
from llmc.compiler.options import CompileOptions
from llmc.compiler.program.program import DTYPES, PROGRAM, Program, both_weightless, program_for
from llmc.compiler.stages import Stages, version_of
from llmc.compiler.targets.base import CompiledExecutable, Lowered, Shape, Target, cache_for
from llmc.compiler.targets.costs import WEIGHTS as WEIGHTS_COST
from llmc.compiler.targets.costs import Costs, Timing, Verifying, traces
from llmc.compiler.targets.description import TRACING, DeviceDescription, Hosting, Requirements
from llmc.compiler.weights.stage import PLACEMENTS, WEIGHTS, shared_files
from llmc.compiler.weights.stage import TABLES as TABLES_FILE
from llmc.compiler.weights.stage import TENSORS as TENSORS_FILE
from llmc.errors import CompileError

if TYPE_CHECKING:
    from llmc.buckets.bucket import Bucket
    from llmc.buckets.limits import Limits
    from llmc.runtime.cache_shape import CacheShape

_COMPONENTS = {"weights": WEIGHTS, "placements": PLACEMENTS, "tensors": TENSORS_FILE, "tables": TABLES_FILE}
"""Names of shared files in the keys of executables."""


@dataclass(frozen=True)
class ProgramLowered(Lowered):
    """Adds the programs' cache."""

    cache: CacheShape


class ProgramCosts(Costs):
    """Cost estimates of programs that are traced, and not lowered."""

    executable_seconds: ClassVar[float] = 0.2
    executable_bytes: ClassVar[int] = 40_000
    verifying: ClassVar[Verifying] = replace(Costs.verifying, step=Timing(layers=0.06), tokens=Timing(parameters=2.2))

    def stage_costs(self, options: CompileOptions, buckets: Sequence[Bucket]) -> Mapping[str, Timing]:
        return {"trace": traces(buckets), "weights": WEIGHTS_COST}


PROGRAMS = DeviceDescription(
    "",
    "torch",
    dtypes=tuple(DTYPES),
    config_only=True,
    requirements=Requirements((*TRACING, "gguf", "onnx"), ("torch",), run_extras=("compile",)),
)
"""The common description of these devices."""


class ProgramTarget(Target):
    """The common part of the targets of portable programs."""

    def hosting(self, recorded: Mapping[str, Any]) -> Hosting:
        return Hosting(extra="compile")

    def __init__(self) -> None:
        self._traced: dict[Path, dict[str, Any]] = {}

    def toolchain(self) -> dict[str, str]:
        return {package: version_of(package) for package in ("torch", "transformers")}

    def held_cache(self, cache: CacheShape, limits: Limits, options: CompileOptions) -> CacheShape:
        """Ring buffers of whole blocks, one more than the window's."""
        return cache.in_blocks(limits.block_size, limits.max_model_len)

    def trace(self, stages: Stages, options: CompileOptions) -> Sequence[Program]:
        return both_weightless(stages, options)

    def lower(self, stages: Stages, programs: Sequence[Program], options: CompileOptions) -> Lowered:
        shared = shared_files(stages, programs[0])
        cache = cache_for(self, stages, options)
        return ProgramLowered(
            files=shared.files,
            components={
                **{name: shared.files[file] for name, file in _COMPONENTS.items() if file in shared.files},
                **{program.name: program.outputs[PROGRAM].digest for program in programs},
                "cache": digest_bytes(canonical_json(cache.to_json())),
            },
            inputs={program.name: program.paths[PROGRAM] for program in programs},
            cache=cache,
        )

    def compile(self, lowered: Lowered, shape: Shape, options: CompileOptions) -> CompiledExecutable:
        """Specialise the traced program, and open the result as the executor does."""
        from llmc.compiler.program.to_export import specialise
        from llmc.runtime.portable_program import PortableProgram, write_archive

        batch, query, context = shape.sizes
        program = self._load(lowered.inputs[program_for(context, lowered.inputs)])
        assert isinstance(lowered, ProgramLowered)
        data = write_archive(specialise(program, batch, query, context, lowered.cache))
        try:
            PortableProgram.parse(data)
        except ValueError as e:
            raise CompileError(f"the program for {shape} is not portable: {e}") from e
        return CompiledExecutable(data, self.state)

    def show(self, lowered: Lowered, shapes: Sequence[Shape], options: CompileOptions) -> Iterator[tuple[str, str]]:
        from llmc.compiler.program.sized import TracedProgram

        assert isinstance(lowered, ProgramLowered)
        for shape in shapes:
            path = lowered.inputs[program_for(shape.sizes[2], lowered.inputs)]
            yield str(shape), TracedProgram.parse(path.read_bytes()).at(*shape.sizes, lowered.cache).text()

    def _load(self, path: Path) -> dict[str, Any]:
        """A traced program, read once for all shapes."""
        if path not in self._traced:
            self._traced[path] = json.loads(path.read_bytes())
        return self._traced[path]
