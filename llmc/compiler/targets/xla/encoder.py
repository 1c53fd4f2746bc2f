"""Encoders on XLA: one executable per bucket (texts × tokens) over one weights file, by the target for generation.

The program is traced once without tensors, and weights are arguments, so that executables depend only on shapes:
another checkpoint of the same shapes finds them all in the store. TPUs are only described (`--device tpu:v5e-1x1`):
verification runs the portable programs on this host's CPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from llmc.artifacts.key import canonical_json
from llmc.compiler.code import code_digest
from llmc.compiler.program.program import DTYPES, TRANSFORMS
from llmc.compiler.stages import toolchain
from llmc.compiler.targets import open_target
from llmc.compiler.targets.base import Recorded
from llmc.compiler.targets.encoder import CompiledEncoder, EncoderCase, EncoderTarget
from llmc.compiler.targets.workers import Jobs, Workers
from llmc.compiler.targets.xla.capacity import Need, gib
from llmc.compiler.targets.xla.described import DescribedTarget
from llmc.compiler.weights.stage import ITEM_BYTES, PLACEMENTS, WEIGHTS
from llmc.errors import CompileError, InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmc.artifacts.digest import Blob
    from llmc.artifacts.store.entries import Entry
    from llmc.artifacts.store.workspace import Workspace
    from llmc.buckets.encoding import EncodePlan
    from llmc.compiler.options import CompileOptions
    from llmc.compiler.stages import Stages
    from llmc.compiler.targets.base import State
    from llmc.compiler.targets.xla.build import XlaJob
    from llmc.compiler.targets.xla.target import XlaTarget
    from llmc.compiler.weights.stage import Described


def traced_weightless(stages: Stages, case: EncoderCase, options: CompileOptions) -> Entry:
    """Return an entry with torch's model.json (`program`), tensors.json (`tensors`), `weights` and `placements`.

    Its meta has the names of the program's `inputs`, and whether it has `type_ids`. Computed constants are float32 or
    int32. Raises CheckpointError and CompileError.
    """
    components = {
        **case.components(stages),
        "dialect": "weightless",
        "quantize": options.quantize,
        "dtype": options.dtype,
        **toolchain("torch", "transformers", "numpy", "sympy", python=True),
        "code": code_digest(traced_weightless),
    }

    def build(workspace: Workspace) -> Mapping[str, Blob]:
        import torch

        from llmc.compiler.frontend.encode import Encode, trace_weightless_encoder
        from llmc.compiler.program.to_export import serialise
        from llmc.compiler.targets.xla.formats import described_as
        from llmc.compiler.weights.recipes import ModuleTensors
        from llmc.compiler.weights.stage import written_weights

        model = Encode(stages.checkpoint, case.task, case.judges)
        traced = trace_weightless_encoder(model, getattr(torch, DTYPES[options.dtype]))
        tables = {name: _table(buffer.numpy()) for name, buffer in traced.buffers.items()}
        described: Sequence[Described] = [
            {
                "name": name, "transform": TRANSFORMS[options.dtype], "shape": shape, "dtype": DTYPES[options.dtype],
                "sources": [name],
            }
            for name, shape in traced.parameters.items()
        ] + [
            {"name": name, "transform": "table", "shape": array.shape, "dtype": str(array.dtype), "sources": []}
            for name, array in tables.items()
        ]  # fmt: skip
        stack = described_as(False, str(options.quantize))
        described = stack(described) if stack else described
        workspace.meta |= {"type_ids": model.typed, "inputs": list(model.inputs)}
        return {
            "program": workspace.put_bytes(canonical_json(serialise(traced.exported))),
            "tensors": workspace.put_bytes(canonical_json(list(described))),
            **written_weights(described, ModuleTensors(model), tables, workspace),
        }

    return stages.run("encoder", components, build)


def _table(array: NDArray[Any]) -> NDArray[Any]:
    return array.astype("float32" if array.dtype.kind == "f" else "int32")


class XlaEncoderTarget(EncoderTarget):
    """Compiles encoders for this host's CPU."""

    name: ClassVar[str] = "xla"
    encoder: ClassVar[str] = "xla-encoder"
    quantisations: ClassVar[tuple[str, ...]] = ("none", "int8")
    dtypes: ClassVar[tuple[str, ...]] = tuple(DTYPES)
    packages: ClassVar[tuple[str, ...]] = ("jax",)

    def __init__(self, detail: str = "") -> None:
        self._device = f"{self.name}:{detail}" if detail else self.name

    @classmethod
    def of(cls, detail: str) -> Self:
        built = cls(detail)
        _ = built.compiler
        return built

    @cached_property
    def compiler(self) -> XlaTarget:
        from llmc.compiler.targets.xla.target import XlaTarget

        found = open_target(self._device)
        assert isinstance(found, XlaTarget)
        return found

    def choice(self, options: CompileOptions) -> str:
        return "one executable per bucket of texts × tokens: XLA compiles fixed shapes"

    def configure(self, options: CompileOptions) -> CompileOptions:
        built = super().configure(options)
        self.compiler.configure(built)
        return built

    def specialised(self, options: CompileOptions) -> bool:
        if options.specialise is False:
            why = self.compiler.description.why_static
            raise InputError(f"--no-specialise is not offered for device {self.name}: {why}; leave the flag out")
        return True

    @property
    def state(self) -> State:
        return self.compiler.state

    def toolchain(self) -> dict[str, str]:
        return self.compiler.toolchain()

    def recorded(self, options: CompileOptions) -> Recorded:
        return Recorded(self.encoder, self.compiler.isa())

    def traced(self, stages: Stages, case: EncoderCase, options: CompileOptions) -> Iterator[tuple[str, str]]:
        from llmc.compiler.program.sized import TracedProgram

        program, _, inputs = _given(stages, traced_weightless(stages, case, options))
        yield "encode", TracedProgram.parse(program.read_bytes(), inputs).text()

    def lowered(
        self, stages: Stages, plan: EncodePlan, case: EncoderCase, options: CompileOptions
    ) -> Iterator[tuple[str, str]]:  # fmt: skip
        machine = self.compiler.machine(options)
        from llmc.compiler.targets.xla.build import stablehlo

        given = _given(stages, traced_weightless(stages, case, options))
        for bucket in plan.buckets:
            job = _job(given, (bucket.batch, bucket.query))
            yield job.name, stablehlo(job, machine)

    def make(self, stages: Stages, plan: EncodePlan, case: EncoderCase, options: CompileOptions) -> CompiledEncoder:
        traced = traced_weightless(stages, case, options)
        shapes = [(bucket.batch, bucket.query) for bucket in plan.buckets]
        preload = self.compiler.description.fresh_process
        workers = partial(Workers, preload=preload) if preload or options.jobs > 1 else None
        with Jobs(options.jobs, workers) as jobs:
            built = jobs.each(partial(self._executable, stages, traced, options, jobs), shapes)
        files = {WEIGHTS: traced.outputs["weights"].digest, PLACEMENTS: traced.outputs["placements"].digest}
        return CompiledEncoder(
            list(zip(shapes, built, strict=True)), files, {"type_ids": bool(traced.meta["type_ids"])}
        )

    def analyse(self, stages: Stages, built: CompiledEncoder, options: CompileOptions) -> dict[str, Any]:
        files = [stages.path(entry.outputs["executable"]) for _, entry in built.executables]
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
"""Files of the traced program and of its weights' description (tensors.json), and the names of its inputs."""


def _given(stages: Stages, traced: Entry) -> Given:
    program, tensors = (stages.path(traced.outputs[name]) for name in ("program", "tensors"))
    return program, tensors, tuple(traced.meta["inputs"])


def compile_shape(device: str, given: Given, shape: tuple[int, int], options: CompileOptions) -> bytes:
    """Compile a bucket's executable file in this process. Raises CompileError."""
    target = open_target(device)
    target.machine(options)  # type: ignore[attr-defined] # JAX is configured before anything imports it
    built: bytes = target.build(_job(given, shape), options)  # type: ignore[attr-defined] # an XlaTarget
    return built


def _job(given: Given, shape: tuple[int, int]) -> XlaJob:
    from llmc.compiler.targets.xla.step import encode_job

    program, tensors, inputs = given
    return encode_job(program.read_bytes(), inputs, json.loads(tensors.read_bytes()), *shape)


class TpuEncoderTarget(XlaEncoderTarget):
    """Compiles encoders for described TPUs."""

    name: ClassVar[str] = "tpu"
    packages: ClassVar[tuple[str, ...]] = ("jax", "libtpu")

    def analyse(self, stages: Stages, built: CompiledEncoder, options: CompileOptions) -> dict[str, Any]:
        found = super().analyse(stages, built, options)
        assert isinstance(self.compiler, DescribedTarget)
        topology = self.compiler.topology
        offsets = json.loads(stages.store.get_bytes(built.files[PLACEMENTS])).values()
        weights = sum(topology.array_bytes(at["shape"], ITEM_BYTES[at["dtype"]]) for at in offsets)
        need = Need.of(weights, 0, [e["memory"] for e in found["executables"]])
        if need.total > topology.usable_bytes:
            raise CompileError(
                f"does not fit {topology.name} by {gib(need.total - topology.usable_bytes)} a {topology.unit}: {need}; "
                f"a {topology.unit} has {gib(topology.usable_bytes)} for programs; lower --max-num-seqs or "
                f"--max-model-len, or choose {topology.larger}"
            )
        memory = {**asdict(need), "total": need.total, "available": topology.usable_bytes}
        return {"topology": topology.name, "device_memory": memory, **found}
