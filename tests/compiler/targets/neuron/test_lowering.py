"""What neuronx-cc has no operator for, written in those that it has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from llmc.compiler.targets.neuron import lowering
from tests.compiler.frontend.test_recurrent import CASES as STATEFUL
from tests.compiler.targets.xla.test_operators import CASES, operator
from tests.tiers import default_cases


@default_cases(2)
@pytest.mark.parametrize(("size", "top_k"), [(40, 8), (41, 8), (64, 16), (100, 3), (300, 8), (16, 4)])
def test_pieces_give_what_the_whole_gives_ties_included(size: int, top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import jax.numpy as jnp
    from jax import lax

    monkeypatch.setattr(lowering, "PIECE", 16)
    logits = jnp.asarray(np.random.default_rng(size).integers(0, 9, (3, size)).astype(np.float32))

    values, ids = lowering.top_of_pieces(logits, top_k)

    wanted = lax.top_k(logits, top_k)
    assert (np.asarray(values) == np.asarray(wanted[0])).all()
    assert (np.asarray(ids) == np.asarray(wanted[1])).all()


@default_cases(2)
@pytest.mark.parametrize(("shape", "axis"), [((5, 3), 0), ((2, 64), 1), ((2, 1, 3), 1), ((3, 7, 2), 1)])
def test_a_running_sum_is_a_cumsum(shape: tuple[int, ...], axis: int) -> None:
    import jax.numpy as jnp

    values = np.random.default_rng(0).integers(-9, 9, shape).astype(np.float32)
    assert (np.asarray(lowering.running_sum(jnp.asarray(values), axis)) == np.cumsum(values, axis)).all()


CHOICES = ("topk.default", "max.dim", "scatter.value", "gather.default")


def test_states_and_choices_of_experts_are_computed_without_calls_and_loops() -> None:
    """`lower` refuses a module with an operator that neuronx-cc does not take."""
    from llmc.compiler.targets.xla.build import XlaJob, host_machine
    from llmc.compiler.targets.xla.operators import RULES
    from llmc.runtime.executors.neuron.files import NeuronFile
    from llmc.runtime.executors.xla.envelope import Tensor

    found = [(f"llmc.{name.split(maxsplit=1)[0]}.default", STATEFUL[name](70)) for name in STATEFUL]
    found += [(name, args) for name, args, kwargs in CASES if name in CHOICES and not kwargs]
    arrays: list[Any] = []
    calls = []
    for name, args in found:
        target = getattr(torch.ops.llmc, name.split(".")[1]).default if name.startswith("llmc.") else operator(name)
        given = {a.name: value for a, value in zip(target._schema.arguments, args, strict=False) if value is not None}
        offsets = {k: len(arrays) + i for i, k in enumerate(k for k, v in given.items() if hasattr(v, "dtype"))}
        arrays += [np.asarray(given[k]) for k in offsets]
        calls.append((RULES[name], {k: v for k, v in given.items() if k not in offsets}, offsets))

    def function(*inputs: Any) -> tuple[Any, ...]:
        built = [rule(**rest, **{k: inputs[i] for k, i in offsets.items()}) for rule, rest, offsets in calls]
        return (
            sum(each.astype("float32").sum() for out in built for each in (out if isinstance(out, tuple) else [out])),
        )

    dtypes = ["int32" if a.dtype.kind == "i" else "float32" for a in arrays]
    inputs = [
        Tensor(f"i{i}", a.shape, d, (None,) * a.ndim) for i, (a, d) in enumerate(zip(arrays, dtypes, strict=True))
    ]
    data = lowering.lower(XlaJob("step", function, tuple(inputs), (), "rules"), host_machine(1, 1), "trn2")
    assert len(NeuronFile.parse(data, "rules").module.inputs) == len(arrays)
