"""The largest logits of a wide vocabulary, found piece by piece."""

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
