"""A traced program in the store: the input of a target's lowering, the same for every quantisation.

fused      the graph language (ir.py) before fusing: "program" is its graph, "tables" its computed constants
two_part   torch's own form (runtime/portable_program.py), without a cache ("first") or with one ("cached"):
           "program" is model.json, "tensors" describes its weights, "tables" has its constants (weights/stage.py)
read_only  the same form, with attention as one operator (frontend/attention.py)
"""

from __future__ import annotations

import io
import json
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from llmc.artifacts.digest import digest_bytes
from llmc.artifacts.key import canonical_json
from llmc.compiler.architectures.shared.caches import cache_of
from llmc.compiler.code import code_digest
from llmc.compiler.stages import Stages, toolchain

if TYPE_CHECKING:
    from llmc.artifacts.digest import Blob
    from llmc.artifacts.store.entries import Entry
    from llmc.artifacts.store.workspace import Workspace
    from llmc.compiler.options import CompileOptions
    from llmc.compiler.program.ir import Graph


PROGRAM, TABLES, TENSORS = "program", "tables", "tensors"


@dataclass(frozen=True)
class Program:
    """One traced program: `outputs` of its stage by name, with "program" among them, and the `paths` of these files."""

    name: str
    outputs: Mapping[str, Blob]
    paths: Mapping[str, Path]

    @classmethod
    def stored(cls, name: str, stages: Stages, entry: Entry) -> Self:
        """The program in a stage's entry."""
        return cls(name, entry.outputs, {key: stages.path(blob) for key, blob in entry.outputs.items()})

    @property
    def components(self) -> dict[str, str]:
        """Key components that name the program."""
        return {name: blob.digest for name, blob in self.outputs.items() if name in (PROGRAM, TABLES)}

    def text(self) -> str:
        """The program for people."""
        return self.paths[PROGRAM].read_text()


@dataclass(frozen=True)
class GraphProgram(Program):
    """A program of dialect fused."""

    def graph(self) -> Graph:
        """Copy of its graph, for rewriting."""
        return read_graph(self.paths[PROGRAM].read_bytes(), self.paths[TABLES].read_bytes())

    def text(self) -> str:
        """One operator a line."""
        return self.graph().text()


@dataclass(frozen=True)
class WeightlessProgram(Program):
    """A program of dialect two_part or read_only."""

    def text(self) -> str:
        """One operator a line, with symbolic sizes."""
        from llmc.compiler.program.sized import TracedProgram

        return TracedProgram.parse(self.paths[PROGRAM].read_bytes()).text()


def write_graph(graph: Graph) -> dict[str, bytes]:
    """The graph as files for `read_graph`; values are numbered in the order of their first use."""
    import numpy as np

    numbers: dict[int, int] = {}
    values: list[list[Any]] = []

    def number(value: Any) -> int | None:
        if value is None:
            return None
        if id(value) not in numbers:
            numbers[id(value)] = len(values)
            values.append([value.name, list(value.shape), value.dtype])
        return numbers[id(value)]

    fields = {
        "inputs": [[name, number(v)] for name, v in graph.inputs.items()],
        "weights": [[number(v), name] for v, name in graph.weights.items()],
        "tables": [number(v) for v in graph.tables],
        "nodes": [[n.op, [number(v) for v in n.inputs], [number(v) for v in n.outputs], n.attrs] for n in graph.nodes],
        "outputs": [[name, number(v)] for name, v in graph.outputs],
        "values": values,
    }
    tables = io.BytesIO()
    arrays: dict[str, Any] = {f"v{number(v)}": table for v, table in graph.tables.items()}
    np.savez(tables, **arrays)
    return {PROGRAM: json.dumps(fields).encode(), TABLES: tables.getvalue()}


def read_graph(program: bytes, tables: bytes) -> Graph:
    """The inverse of `write_graph`."""
    import numpy as np

    from llmc.compiler.program.ir import Graph, Node, Value

    fields = json.loads(program)
    values = [Value(name, tuple(shape), dtype) for name, shape, dtype in fields["values"]]

    def of(number: int | None) -> Value | None:
        return None if number is None else values[number]

    with np.load(io.BytesIO(tables), allow_pickle=False) as stored:
        found = {values[number]: stored[f"v{number}"] for number in fields["tables"]}
    return Graph(
        inputs={name: values[number] for name, number in fields["inputs"]},
        outputs=[(name, values[number]) for name, number in fields["outputs"]],
        nodes=[
            Node(op, [of(i) for i in ins], [values[o] for o in outs], attrs) for op, ins, outs, attrs in fields["nodes"]
        ],
        weights={values[number]: name for number, name in fields["weights"]},
        tables=found,
    )


KIND = "trace"
WeightlessDialect = Literal["two_part", "read_only"]
"""Dialects of programs that take weights as inputs (frontend/attention.py)."""

FIRST, CACHED = "program_first", "program_cached"
"""Names of programs without a cache, and with one, in executables' keys."""

DTYPES = {"f32": "float32", "bf16": "bfloat16"}
"""Possible dtypes of weights and cache, by the options' names."""

TRANSFORMS = {"f32": "dense", "bf16": "bf16"}
"""Recipe transforms (weights/recipes.py) that create weights of such a dtype."""


def traced_graph(stages: Stages) -> GraphProgram:
    """Trace the model in dialect fused, as a graph before fusing. Needs no weights. Raises CompileError."""
    components = {
        "config": stages.config_digest,
        "dialect": "fused",
        "cache": _cache(stages),
        "max_positions": stages.max_positions,
        **toolchain("torch", "transformers", "sympy", "numpy", python=True),
        "code": code_digest(traced_graph),
    }

    def build(workspace: Workspace) -> Mapping[str, Blob]:
        from llmc.compiler.checkpoint.adapter_layout import AdapterLayout
        from llmc.compiler.frontend.trace import trace
        from llmc.compiler.program.import_fx import import_program

        config = stages.checkpoint.config
        traced = trace(config, "fused")
        graph = import_program(traced, stages.max_positions, cache_of(config), AdapterLayout.of(config))
        return {name: workspace.put_bytes(data) for name, data in write_graph(graph).items()}

    return GraphProgram.stored("step", stages, stages.run(KIND, components, build))


def traced_weightless(
    stages: Stages, options: CompileOptions, cached: bool, dialect: WeightlessDialect = "two_part"
) -> WeightlessProgram:
    """Trace the model in `dialect` with symbolic sizes, without a cache or with one; the same for every target. Its
    files are those of weights/stage.py. Needs no weights. Raises CompileError."""
    components = {
        "config": stages.config_digest,
        "dialect": dialect,
        "cache": _cache(stages),
        "cached": cached,
        "dtype": options.dtype,
        **({"sample_top_k": options.sample_top_k} if options.sample_top_k else {}),
        **toolchain("torch", "transformers", "sympy", "numpy", python=True),
        "code": code_digest(traced_weightless),
    }

    def build(workspace: Workspace) -> Mapping[str, Blob]:
        import io

        import numpy as np
        import torch

        from llmc.compiler.frontend.trace import trace_weightless
        from llmc.compiler.program.to_export import serialise

        dtype = getattr(torch, DTYPES[options.dtype])
        traced = trace_weightless(
            stages.checkpoint.config, dialect, cached=cached, dtype=dtype, top_k=options.sample_top_k
        )
        described: list[dict[str, Any]] = [
            {
                "name": name, "transform": TRANSFORMS[options.dtype], "shape": shape, "dtype": DTYPES[options.dtype],
                "sources": [name],
            }
            for name, shape in traced.parameters.items()
        ]  # fmt: skip
        described += [
            {"name": name, "transform": "table", "shape": tuple(b.shape), "dtype": "float32", "sources": []}
            for name, b in traced.buffers.items()
        ]
        tables = io.BytesIO()
        np.savez(tables, **{name: b.float().numpy() for name, b in traced.buffers.items()})
        return {
            "program": workspace.put_bytes(canonical_json(serialise(traced.exported))),
            "tensors": workspace.put_bytes(canonical_json(described)),
            "tables": workspace.put_bytes(tables.getvalue()),
        }

    return WeightlessProgram.stored(CACHED if cached else FIRST, stages, stages.run(KIND, components, build))


def _cache(stages: Stages) -> str:
    return digest_bytes(canonical_json(cache_of(stages.checkpoint.config).to_json()))


def both_weightless(
    stages: Stages, options: CompileOptions, dialect: WeightlessDialect = "two_part"
) -> list[WeightlessProgram]:
    """Trace without and with a cache, as the plan needs; graphs that read no cached tokens all take recurrent state."""
    states = not stages.plan.limits.contexts
    needed = sorted({bucket.context > 0 or states for bucket in stages.plan.buckets})
    return [traced_weightless(stages, options, cached, dialect) for cached in needed]


def program_for(context: int, traced: Container[str]) -> str:
    """The traced program that computes a shape: CACHED also at context 0 where there is no other."""
    return CACHED if context or FIRST not in traced else FIRST
