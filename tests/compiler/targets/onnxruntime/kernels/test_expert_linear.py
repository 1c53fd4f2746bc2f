"""Products with each token's experts, against the same arithmetic in numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from llmc.compiler.targets.onnxruntime.formats import TABLES
from tests.compiler.targets.onnxruntime.kernels.single import Library, quantised, run
from tests.compiler.targets.onnxruntime.kernels.test_linear import ONCE, Array, attributes, close, matrix, tabled
from tests.tiers import full

COUNT, ROWS, WIDTH, GROUP = 5, 40, 96, 32
FORMATS = [(4, "symmetric"), (4, "zeros"), (6, "offsets"), (8, "symmetric")]


def experts(bits: int, once: str) -> tuple[NDArray[np.uint8], list[Array], dict[str, int]]:
    """Panels, weights and attributes of random experts; 0 bits for float4's table."""
    part, offsets = ONCE[once]
    built = [
        matrix(ROWS, WIDTH, GROUP, bits, bool(offsets), e, once == "zeros")
        if bits
        else tabled(ROWS, WIDTH, GROUP, "float4")
        for e in range(COUNT)
    ]
    table = 0 if bits else TABLES.index("float4")
    attrs = attributes(ROWS, WIDTH, GROUP, bits or 4, offsets, table) | {"experts": COUNT}
    return np.concatenate([held[f"panels{part}"] for held, _ in built]), [weights for _, weights in built], attrs


def wanted(x: Array, ids: NDArray[np.int64], weights: list[Array], bias: Array | None) -> Array:
    rows = np.broadcast_to(x[:, None], (*ids.shape, WIDTH)) if x.ndim == 2 else x
    built = [
        [
            (quantised(rows[t, c][None], GROUP) @ weights[e].T)[0] + (0 if bias is None else bias[e])
            for c, e in enumerate(chosen)
        ]
        for t, chosen in enumerate(ids)
    ]
    return np.array(built, np.float32)


def matmul(library: Library, x: Array, ids: NDArray[np.int64], panels: NDArray[np.uint8], bias: Array | None,
            attrs: dict[str, int]) -> Array:  # fmt: skip
    return run(library, "ExpertLinear", [("x", x), ("ids", ids), ("w", panels), ("b", bias)], ["y"], **attrs)["y"]


@pytest.mark.parametrize(("bits", "once"), [*FORMATS, (0, "symmetric")], ids=str)
def test_each_token_meets_its_experts(library: Path, bits: int, once: str) -> None:
    panels, weights, attrs = experts(bits, once)
    random = np.random.default_rng(1)
    for tokens in (1, 2, 7, 33):
        ids = random.integers(0, COUNT, (tokens, 3))
        bias = random.normal(0, 1, (COUNT, ROWS)).astype(np.float32)
        for shape in ((tokens, WIDTH), (tokens, 3, WIDTH)):
            x = random.normal(0, 1, shape).astype(np.float32)
            for b in (None, bias):
                built = matmul(library, x, ids, panels, b, attrs)
                assert close(built, wanted(x, ids, weights, b)), (tokens, shape, b is None)


def test_a_token_s_results_are_the_same_whatever_others_there_are(library: Path) -> None:
    panels, _, attrs = experts(8, "symmetric")
    random = np.random.default_rng(1)
    x, ids = random.normal(0, 1, (200, WIDTH)).astype(np.float32), random.integers(0, COUNT, (200, 2))
    whole = matmul(library, x, ids, panels, None, attrs)
    for each in (slice(0, 1), slice(17, 22), slice(100, 200)):
        assert (matmul(library, x[each], ids[each], panels, None, attrs) == whole[each]).all()


@full
def test_every_set_gives_the_same_bits(library: Path, others: dict[str, Library]) -> None:
    panels, _, attrs = experts(0, "symmetric")
    random = np.random.default_rng(1)
    x, ids = random.normal(0, 1, (9, WIDTH)).astype(np.float32), random.integers(0, COUNT, (9, 2))
    bias = random.normal(0, 1, (COUNT, ROWS)).astype(np.float32)
    own = matmul(library, x, ids, panels, bias, attrs)
    for name, other in others.items():
        assert own.tobytes() == matmul(other, x, ids, panels, bias, attrs).tobytes(), name
