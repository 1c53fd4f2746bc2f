"""Every set of kernels gives the same bits: what one is held to elsewhere holds for all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmc.compiler.targets.onnxruntime.kernels import build
from tests.compiler.targets.onnxruntime.kernels.single import run
from tests.compiler.targets.onnxruntime.kernels.test_attention import CASES
from tests.compiler.targets.onnxruntime.kernels.test_experts import Layer, step
from tests.compiler.targets.onnxruntime.kernels.test_linear import ONCE, attributes, matrix
from tests.compiler.targets.onnxruntime.kernels.test_states import ALL, computed, ends_met, named

Arrays = dict[str, NDArray[Any]]


def same_everywhere(libraries: dict[str, Path], made: Callable[[Path], Arrays]) -> None:
    wanted, *others = (made(library) for library in libraries.values())
    for name, other in zip(list(libraries)[1:], others, strict=True):
        for output, x in wanted.items():
            assert x.tobytes() == other[output].tobytes(), (name, output)


@pytest.mark.parametrize("once", list(ONCE))
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("size", [(96, 576, 32), (100, 96, 16), (40, 256, 128), (17, 72, 8)], ids=str)
def test_products(libraries: dict[str, Path], size: tuple[int, int, int], bits: int, once: str) -> None:
    part, offsets = ONCE[once]
    held, _ = matrix(*size, bits, bool(offsets), zeros=once == "zeros")
    for count in (1, 2, 3, 4, 5, 8, 13):
        x = np.random.default_rng(count).normal(0, 1, (count, size[1])).astype(np.float32)
        given: list[tuple[str, NDArray[Any] | None]] = [("x", x), ("w", held[f"panels{part}"])]
        same_everywhere(
            libraries,
            lambda library, given=given: run(
                library, "Linear", given, ["y", "-s"], **attributes(*size, bits, offsets), gated=0
            ),
        )


def test_codes_that_are_the_furthest_from_zero(libraries: dict[str, Path]) -> None:
    """Products in 16 bits would overflow here, were they not kept within."""
    for bits in (4, 8):
        held, _ = matrix(32, 256, 64, bits, offsets=True)
        held.codes[:16], held.codes[16:] = 0, (1 << bits) - 1
        x = np.where(np.arange(256) % 3 == 0, -1.0, 1.0)[None].astype(np.float32) * np.ones((5, 1), np.float32)
        given: list[tuple[str, NDArray[Any] | None]] = [("x", x), ("w", held["panels+offsets"])]
        attrs = attributes(32, 256, 64, bits, 1)
        same_everywhere(
            libraries, lambda library, g=given, a=attrs: run(library, "Linear", g, ["y", "-s"], **a, gated=0)
        )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_attention(libraries: dict[str, Path], case: Any) -> None:
    given = case.inputs()
    same_everywhere(libraries, lambda library: case.run(library, given))


@pytest.mark.parametrize("name", ALL)
def test_states(libraries: dict[str, Path], name: str) -> None:
    kind, given = name.split(maxsplit=1)[0], ALL[name](19)
    fed, attrs = ends_met(kind, named(kind, given))
    same_everywhere(libraries, lambda library: dict(zip("ys", computed(library, kind, fed, attrs), strict=True)))


@pytest.mark.parametrize("offsets", [False, True])
def test_experts_norms_and_embeddings(libraries: dict[str, Path], offsets: bool) -> None:
    layer = Layer(bits=4, offsets=offsets)
    same_everywhere(libraries, lambda library: {"y": layer.run(library, *step(9))})
    random = np.random.default_rng(0)
    x, residual = random.normal(0, 1, (2, 5, 83)).astype(np.float32)
    given: list[tuple[str, NDArray[Any] | None]] = [("x", x), ("r", residual), ("w", x[0])]
    same_everywhere(libraries, lambda library: run(library, "AddNorm", given, ["y", "sum"], eps=1e-5))
    held, _ = matrix(20, 96, 32, 4, offsets)
    asked: list[tuple[str, NDArray[Any] | None]] = [
        ("ids", np.arange(20)), ("w", held["panels+offsets" if offsets else "panels"]),
    ]  # fmt: skip
    same_everywhere(
        libraries, lambda library: run(library, "Embedding", asked, ["y"], **attributes(20, 96, 32, 4, int(offsets)))
    )


def test_no_two_sets_have_one_library(libraries: dict[str, Path]) -> None:
    assert len({path.read_bytes() for path in libraries.values()}) == len(libraries)
    assert set(libraries) <= set(build.TARGETS)
