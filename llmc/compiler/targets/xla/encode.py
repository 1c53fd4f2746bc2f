"""A model without a cache as a JAX function of one bucket: the traced program, and its weights as arguments.

    encode(token_ids [B, T], lengths [B], type_ids [B, T] where the model has segments, *weights)
        → hidden states [B, T, H], or logits [B, labels], float32

Integers are int32. Nothing is donated: a program of frontend/encode.py keeps nothing between calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax.numpy as jnp

from llmc.compiler.program.sized import TracedProgram
from llmc.compiler.targets.xla.build import Job
from llmc.compiler.targets.xla.evaluate import Array, evaluate
from llmc.compiler.targets.xla.quantised_core import Parts
from llmc.runtime.executors.encoders import LENGTHS
from llmc.runtime.executors.xla.envelope import Tensor

if TYPE_CHECKING:
    from llmc.compiler.weights.weightless import Described


def encode_job(program: bytes, inputs: Sequence[str], described: Sequence[Described], batch: int, tokens: int) -> Job:
    """The program at `batch` texts of `tokens` tokens; `described` are all tensors that its weights are made of.

    Raises CompileError where a guard of the trace does not hold there.
    """
    bound = TracedProgram.parse(program, inputs).at(batch, tokens, 0)
    weights = {d["name"]: _whole(d["name"], d["shape"], d["dtype"]) for d in described}
    parts = Parts(list(bound.weights.values()), weights)

    def encode(*arrays: Array) -> tuple[Array]:
        given, held = arrays[: len(inputs)], parts.joined(arrays[len(inputs) :])
        values = dict(zip((*inputs, *bound.weights), (*given, *held), strict=True))
        return (evaluate(bound, bound.operations, values)[bound.outputs[0]].astype(jnp.float32),)

    shapes = {name: (batch,) if name == LENGTHS else (batch, tokens) for name in inputs}
    given = [_whole(name, shape, "int32") for name, shape in shapes.items()]
    taken = (*given, *(weights[name] for name in parts.names))
    return Job("encode", encode, taken, (), f"encode batch={batch} query={tokens}")


def _whole(name: str, shape: Sequence[int], dtype: str) -> Tensor:
    """An input that is on every device."""
    return Tensor(name, tuple(shape), dtype, (None,) * len(shape))
