"""Traced program of dialect two_part → an OpenVINO model of one shape: for models whose graph has no fused form.

The program is a straight line of ATen operators, each of which has a rule. Inputs and outputs are those of the fused
form (static.py), and so is what weights are: matrices of linear products and embeddings in the format's form,
everything else in float32, all of it by the checkpoint's names, in one file.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from llmc.compiler.program.sized import TracedProgram
from llmc.compiler.targets.openvino.formats import WeightFormat
from llmc.compiler.targets.openvino.graph_model import model_of, parameter
from llmc.compiler.targets.openvino.operations import Operations, Tables
from llmc.compiler.targets.openvino.rope_tables import angle_tables
from llmc.compiler.targets.openvino.static import step_parameters
from llmc.errors import CompileError


def portable_model(
    program: TracedProgram, tables: Tables, weights: WeightFormat, max_positions: int, batch: int, query: int,
    context: int,
) -> ov.Model:  # fmt: skip
    """The model of a traced `program` for `batch` rows of `query` new tokens over a cache of `context` tokens.

    `tables` are the program's computed constants by name, and `context` is 0 exactly where it was traced without a
    cache. Constants are declared in `weights.constants`. Raises CompileError naming an operator that has no rule.
    """
    if bool(program.cache) != bool(context):
        how = "with" if program.cache else "without"
        raise CompileError(f"the program was traced {how} a cache: context {context} needs the other one")
    bound = program.at(batch, query, context)
    step = step_parameters(batch, query)
    caches = _cache_parameters(program, batch, context)
    values = step | caches
    constants = weights.constants
    new = constants.table(f"tokens_{query}", np.arange(query, dtype=np.int32))
    positions = ops.add(ops.unsqueeze(step["past_lengths"], constants.small([1])), new)
    for name, angles in angle_tables(program, tables, max(2, max_positions), context).items():
        values[name] = angles.look_up(constants, positions)
    made = Operations(program, tables, weights, values).lower(bound.operations)
    names = ["logits", *(("top_values", "top_ids") if bound.top else ())]
    names += [f"new_{'kv'[i % 2]}{i // 2}" for i in range(len(bound.new_entries))]
    outputs = [(name, made[output]) for name, output in zip(names, bound.outputs, strict=True)]
    return model_of([*step.values(), *caches.values()], outputs)


def _cache_parameters(program: TracedProgram, batch: int, context: int) -> dict[str, Any]:
    """The cache's inputs, by the program's names for them."""
    made = {}
    for i, name in enumerate(program.cache):
        _, heads, _, size = program.graph["tensor_values"][name]["sizes"]
        shape = (batch, int(heads["as_int"]), context, int(size["as_int"]))
        made[name] = parameter(f"past_{'kv'[i % 2]}{i // 2}", shape, ov.Type.f32)
    return made
