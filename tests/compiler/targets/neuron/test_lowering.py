"""What neuronx-cc has no operator for, written in those that it has."""

from __future__ import annotations

import numpy as np
import pytest

from llmc.compiler.targets.neuron import lowering


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


@pytest.mark.parametrize(("shape", "axis"), [((5, 3), 0), ((2, 64), 1), ((2, 1, 3), 1), ((3, 7, 2), 1)])
def test_a_running_sum_is_a_cumsum(shape: tuple[int, ...], axis: int) -> None:
    import jax.numpy as jnp

    values = np.random.default_rng(0).integers(-9, 9, shape).astype(np.float32)
    assert (np.asarray(lowering.running_sum(jnp.asarray(values), axis)) == np.cumsum(values, axis)).all()
