"""Encoders on XLA: an executable a bucket (texts × tokens), all over one weights file, by `--device xla`'s compiler.

The program is traced once without a tensor in it, and weights are arguments, so that executables depend on shapes
alone: another checkpoint of the same shapes finds them all in the store. What compiles is the target for models that
generate (targets/xla/), with its operators, formats, processes and keys.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from llmc.compiler.code import code_digest
from llmc.compiler.program.stage import DTYPES
from llmc.compiler.targets import open_target
from llmc.compiler.targets.base import Recorded
from llmc.compiler.targets.encoders.base import Case, EncoderTarget, Made
from llmc.compiler.targets.encoders.weightless import traced_weightless
from llmc.compiler.targets.workers import Jobs, Workers
from llmc.compiler.weights.weightless import PLACEMENTS, WEIGHTS
from llmc.errors import InputError

if TYPE_CHECKING:
    from llmc.artifacts.digest import Blob
    from llmc.artifacts.store.entries import Entry
    from llmc.artifacts.store.workspace import Workspace
    from llmc.buckets.encoding import EncodePlan
    from llmc.compiler.options import CompileOptions
    from llmc.compiler.stages import Stages
    from llmc.compiler.targets.base import State
    from llmc.compiler.targets.xla.build import Job
    from llmc.compiler.targets.xla.target import XlaTarget


class XlaEncoderTarget(EncoderTarget):
    """See the module's docstring: for this host's CPU."""

    name: ClassVar[str] = "xla"
    encoder: ClassVar[str] = "xla-encoder"
    quantisations: ClassVar[tuple[str, ...]] = ("none", "int8")
    dtypes: ClassVar[tuple[str, ...]] = tuple(DTYPES)
    packages: ClassVar[tuple[str, ...]] = ("jax",)

    def __init__(self, detail: str = "") -> None:
        self._device = f"{self.name}:{detail}" if detail else self.name

    @classmethod
    def of(cls, detail: str) -> Self:
        """What is behind the device's name means what it means for models that generate."""
        made = cls(detail)
        _ = made.compiler
        return made

    @cached_property
    def compiler(self) -> XlaTarget:
        """The target for models that generate. Raises InputError for what its device cannot be told."""
        from llmc.compiler.targets.xla.target import XlaTarget

        found = open_target(self._device)
        assert isinstance(found, XlaTarget)
        return found

    def choice(self, options: CompileOptions) -> str:
        """A property of the compiler."""
        return "one executable per bucket of texts × tokens: XLA compiles fixed shapes"

    def configure(self, options: CompileOptions) -> CompileOptions:
        """And what the compiler refuses, such as a topology that is not known."""
        made = super().configure(options)
        self.compiler.configure(made)
        return made

    def specialised(self, options: CompileOptions) -> bool:
        """Always."""
        if options.specialise is False:
            why = self.compiler.description.why_static
            raise InputError(f"--no-specialise is not offered for device {self.name}: {why}; leave the flag out")
        return True

    @property
    def state(self) -> State:
        """As the compiler's executables."""
        return self.compiler.state

    def toolchain(self) -> dict[str, str]:
        """JAX, its compiler, and their flags."""
        return self.compiler.toolchain()

    def recorded(self, options: CompileOptions) -> Recorded:
        """And what native code is for."""
        return Recorded(self.encoder, self.compiler.isa())

    def traced(self, stages: Stages, case: Case, options: CompileOptions) -> Iterator[tuple[str, str]]:
        """The program whose weights are inputs."""
        from llmc.compiler.program.sized import TracedProgram

        program, _, inputs = _given(stages, traced_weightless(stages, case, options))
        yield "encode", TracedProgram.parse(program.read_bytes(), inputs).text()

    def lowered(
        self, stages: Stages, plan: EncodePlan, case: Case, options: CompileOptions
    ) -> Iterator[tuple[str, str]]:  # fmt: skip
        """Each bucket as StableHLO, before its platform is chosen."""
        machine = self.compiler.machine(options)
        from llmc.compiler.targets.xla.build import stablehlo

        given = _given(stages, traced_weightless(stages, case, options))
        for bucket in plan.buckets:
            job = _job(given, (bucket.batch, bucket.query))
            yield job.name, stablehlo(job, machine)

    def make(self, stages: Stages, plan: EncodePlan, case: Case, options: CompileOptions) -> Made:
        """One program with its weights, and an executable a bucket, in as many processes as there are jobs."""
        traced = traced_weightless(stages, case, options)
        shapes = [(bucket.batch, bucket.query) for bucket in plan.buckets]
        preload = self.compiler.description.fresh_process
        workers = partial(Workers, preload=preload) if preload or options.jobs > 1 else None
        with Jobs(options.jobs, workers) as jobs:
            made = jobs.each(partial(self._executable, stages, traced, options, jobs), shapes)
        files = {WEIGHTS: traced.outputs["weights"].digest, PLACEMENTS: traced.outputs["placements"].digest}
        return Made(list(zip(shapes, made, strict=True)), files, {"type_ids": bool(traced.meta["type_ids"])})

    def analyse(self, stages: Stages, made: Made, options: CompileOptions) -> dict[str, Any]:
        """What XLA says of each executable (targets/xla/build.py)."""
        files = [stages.path(entry.outputs["executable"]) for _, entry in made.executables]
        return self.compiler.analysed(files)

    def _executable(
        self, stages: Stages, traced: Entry, options: CompileOptions, jobs: Jobs, shape: tuple[int, int]
    ) -> Entry:
        components = {
            "program": traced.outputs["program"].digest,
            "tensors": traced.outputs["tensors"].digest,
            "batch": shape[0],
            "query": shape[1],
            "target": self.name,
            "state": self.state,
            **self.compiler.described_machine(),
            **{f"toolchain.{package}": version for package, version in self.toolchain().items()},
            "isa": " ".join(self.compiler.isa()),
            "code": code_digest(compile_shape, self.compiler.build),
        }

        def build(workspace: Workspace) -> Mapping[str, Blob]:
            given = _given(stages, traced)
            data = jobs.apart(f"{shape[0]} × {shape[1]} tokens", compile_shape, self._device, given, shape, options)
            return {"executable": workspace.put_bytes(data)}

        return stages.run("executable", components, build)


Given = tuple[Path, Path, tuple[str, ...]]
"""Files of the traced program and of what its weights are (tensors.json), and the names of its inputs."""


def _given(stages: Stages, traced: Entry) -> Given:
    program, tensors = (stages.path(traced.outputs[name]) for name in ("program", "tensors"))
    return program, tensors, tuple(traced.meta["inputs"])


def compile_shape(device: str, given: Given, shape: tuple[int, int], options: CompileOptions) -> bytes:
    """The executable file of a bucket, in this process. Raises CompileError."""
    target = open_target(device)
    target.machine(options)  # type: ignore[attr-defined] # JAX is configured before anything imports it
    made: bytes = target.build(_job(given, shape), options)  # type: ignore[attr-defined] # an XlaTarget
    return made


def _job(given: Given, shape: tuple[int, int]) -> Job:
    from llmc.compiler.targets.xla.encode import encode_job

    program, tensors, inputs = given
    return encode_job(program.read_bytes(), inputs, json.loads(tensors.read_bytes()), *shape)
