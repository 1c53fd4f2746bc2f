"""A traced program in the store: the input of a target's lowering, the same for every quantisation.

fused      the graph language (ir.py) before fusing: "program" is its graph, "tables" its computed constants
two_part   torch's own form (runtime/portable_program.py), without a cache ("first") or with one ("cached"):
           "program" is model.json, "tensors" describes its weights, "tables" has its constants (weightless.py)
read_only  the same form, with attention as one operator (frontend/attention.py)
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from llmc.artifacts.digest import Blob
    from llmc.artifacts.store.entries import Entry
    from llmc.compiler.program.ir import Graph
    from llmc.compiler.stages import Stages

PROGRAM, TABLES, TENSORS = "program", "tables", "tensors"


@dataclass(frozen=True)
class Program:
    """One traced program: `outputs` of its stage by name, and the `paths` of these files, which always include
    "program"."""

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
