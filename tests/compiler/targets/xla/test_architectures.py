"""XLA has rules for what families other than Llama's kin compute: their logits are transformers'."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from tests.compiler import tiny
from tests.compiler.replay import SPARE, Replay, Run, Tensors, ringed, symbolic
from tests.tiers import full

pytestmark = [full, pytest.mark.usefixtures("unoptimised_xla")]


QUERY, CONTEXT = 6, 16
STEPS = ((6, 3), (6, 0), (1, 6))
"""New tokens of two rows; the first passes the window and the original length of scaled positions."""


def xla_run(case: str) -> Run:
    import jax

    from llmc.compiler.program.sized import TracedProgram
    from llmc.compiler.targets.xla.step import FlatCore

    traced = TracedProgram.parse(json.dumps(symbolic(case, True)).encode())
    tensors = tiny.tensors(case)
    shape = ringed(case, SPARE)

    @cache
    def compiled(batch: int, query: int, context: int) -> tuple[Any, list[Any]]:
        core = FlatCore(traced.at(batch, query, context, shape))

        def step(ids: Any, past: Any, new: Any, kept: Any, weights: Any) -> Any:
            given = {"token_ids": ids, "past_lengths": past, "new_lengths": new}
            return core.run(given, lambda group, layer: kept[2 * layer + group], weights)

        return jax.jit(step), [tensors[name].numpy() for name in core.weights]

    def run(ids: torch.Tensor, past: torch.Tensor, new: torch.Tensor, kept: Tensors) -> Tensors:
        step, weights = compiled(*ids.shape, max(t.shape[2] for t in kept))
        integers = [t.numpy().astype(np.int32) for t in (ids, past, new)]
        out = step(*integers, [t.numpy() for t in kept], weights)
        pairs = zip(*map(np.array, out.entries), strict=True)
        return [torch.from_numpy(np.array(out.logits)), *(torch.from_numpy(t) for pair in pairs for t in pair)]

    return run


@pytest.mark.parametrize("case", ["gemma2", "cohere2", "ministral3", "gpt2", "opt", "gptj", "falcon-alibi"])
def test_logits_of_ragged_nan_filled_steps_are_transformers_own(case: str) -> None:
    texts = [list(range(20, 36)), [7, *range(100, 115)]]
    rows = Replay(case, xla_run(case), texts, capacity=CONTEXT, in_place=False)
    for counts in STEPS:
        assert max(rows.step(counts, CONTEXT, QUERY)) < 1e-4
