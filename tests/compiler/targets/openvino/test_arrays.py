"""The operators of layers with a state, as a model of fixed sizes: the numbers of those that go from token to token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from llmc.compiler.frontend import chunked, recurrent
from llmc.compiler.targets.openvino.formats import Constants
from llmc.compiler.targets.openvino.graph_model import model_of, parameter
from llmc.compiler.targets.openvino.static import Arrays, GraphArray
from llmc.runtime.executors.openvino.device import open_core
from tests.compiler.targets.openvino.static_models import EXACT

LENGTH = chunked.CHUNK + 5
"""More than one chunk."""
PAST, NEW = [0, 7], [LENGTH, 3]
"""The second row continues, and is padded."""

random = np.random.default_rng(4)


def drawn(*shape: int, low: float = -1.0) -> Any:
    return random.uniform(low, 1, shape).astype(np.float32)


CONV = [drawn(2, LENGTH, 6), drawn(6, 4), drawn(6), drawn(2, 3, 6)]
DELTA = [
    drawn(2, LENGTH, 2, 8), drawn(2, LENGTH, 2, 8), drawn(2, LENGTH, 4, 5), -drawn(2, LENGTH, 4, low=0),
    drawn(2, LENGTH, 4, low=0), drawn(2, 4, 8, 5),
]  # fmt: skip
SCAN = [
    drawn(2, LENGTH, 4, 3), drawn(2, LENGTH, 4, low=0), -drawn(4, low=0), drawn(2, LENGTH, 2, 6),
    drawn(2, LENGTH, 2, 6), drawn(2, 4, 3, 6),
]  # fmt: skip
COLUMNS = [*SCAN[:2], -drawn(4, 6, low=0), *SCAN[3:]]


@pytest.mark.parametrize(
    ("name", "given", "attrs"),
    [
        ("causal_conv", CONV, [True]), ("causal_conv", [*CONV[:2], None, CONV[3]], [False]),
        ("gated_delta", DELTA, [True]), ("state_scan", SCAN, []), ("state_scan", COLUMNS, []),
    ],
)  # fmt: skip
def test_tokens_and_states_are_those_of_the_operator(name: str, given: list[Any], attrs: list[bool]) -> None:
    arrays = Arrays(Constants())
    nodes = [None if a is None else parameter(f"i{n}", a.shape, a.dtype) for n, a in enumerate(given)]
    lengths = [parameter(name, [2], np.int32) for name in ("past", "new")]
    values = [None if node is None else GraphArray(arrays, node) for node in (*nodes, *lengths)]
    built = getattr(chunked, name)(arrays, *values, *attrs)
    inputs = [node for node in (*nodes, *lengths) if node is not None]
    model = model_of(inputs, [(f"o{n}", array.node) for n, array in enumerate(built)])
    fed = [a for a in given if a is not None]
    got = open_core().compile_model(model, "CPU", EXACT)([*fed, np.array(PAST, np.int32), np.array(NEW, np.int32)])
    plain = [None if a is None else torch.from_numpy(a) for a in given]
    out, state = getattr(recurrent, name)(*plain, torch.tensor(PAST), torch.tensor(NEW), *attrs)
    for row, live in enumerate(NEW):
        np.testing.assert_allclose(got["o0"][row, :live], out[row, :live], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(got["o1"], state, rtol=1e-3, atol=1e-4)
