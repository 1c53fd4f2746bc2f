"""Tracing as cached stages: a model is traced once per dialect, for every bucket, target and quantisation."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Any, Literal

from llmc.artifacts.digest import digest_bytes
from llmc.artifacts.key import canonical_json
from llmc.compiler.architectures.shared.caches import cache_of
from llmc.compiler.code import code_digest
from llmc.compiler.program.program import GraphProgram, WeightlessProgram, write_graph
from llmc.compiler.stages import Stages, toolchain

if TYPE_CHECKING:
    from llmc.artifacts.digest import Blob
    from llmc.artifacts.store.workspace import Workspace
    from llmc.compiler.options import CompileOptions

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
    """Trace the model in `dialect` with symbolic sizes, without a cache or with one; the same for every target.

    weights/weightless.py describes its files. Needs no weights and no memory for them. Raises CompileError.
    """
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
    """The cache shape of the architecture, as a key component."""
    return digest_bytes(canonical_json(cache_of(stages.checkpoint.config).to_json()))


def both_weightless(
    stages: Stages, options: CompileOptions, dialect: WeightlessDialect = "two_part"
) -> list[WeightlessProgram]:
    """Trace without and with a cache, as the plan needs; where graphs read no cached tokens, all take recurrent
    state."""
    states = not stages.plan.limits.contexts
    needed = sorted({bucket.context > 0 or states for bucket in stages.plan.buckets})
    return [traced_weightless(stages, options, cached, dialect) for cached in needed]


def program_for(context: int, traced: Container[str]) -> str:
    """The traced program that computes a shape: CACHED also at context 0 where there is no other."""
    return CACHED if context or FIRST not in traced else FIRST
