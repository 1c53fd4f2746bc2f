"""Every set of kernels gives the same bits, but for attention in bfloat16 where a CPU has instructions for it: what one
is held to elsewhere holds for all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmc.artifacts.bundle.kernel_sets import KERNEL_SETS
from llmc.compiler.targets.onnxruntime.formats import TABLES
from llmc.compiler.targets.onnxruntime.kernels.panels import CODEBOOKS
from llmc.runtime.executors.onnxruntime.session import Team
from tests.compiler.targets.onnxruntime.kernels import test_adapted
from tests.compiler.targets.onnxruntime.kernels.host import own_set
from tests.compiler.targets.onnxruntime.kernels.single import Library, run
from tests.compiler.targets.onnxruntime.kernels.test_attention import CASES
from tests.compiler.targets.onnxruntime.kernels.test_coded_cache import CACHES, CODED, UNLIKE, Coded, unlike
from tests.compiler.targets.onnxruntime.kernels.test_experts import Layer, step
from tests.compiler.targets.onnxruntime.kernels.test_linear import ONCE, attributes, formats, matrix, tabled
from tests.compiler.targets.onnxruntime.kernels.test_rounded_cache import ROUNDED
from tests.compiler.targets.onnxruntime.kernels.test_rounded_matmul import matmul
from tests.compiler.targets.onnxruntime.kernels.test_states import ALL, computed, ends_met, named
from tests.compiler.targets.onnxruntime.kernels.test_words import Given, norm, rows_of
from tests.tiers import pairwise

Arrays = dict[str, NDArray[Any]]


def same_everywhere(library: Path, others: dict[str, Library], created: Callable[[Any], Arrays]) -> None:
    wanted = created(library)
    for name, other in others.items():
        found = created(other)
        for output, x in wanted.items():
            assert x.tobytes() == found[output].tobytes(), (name, output)


@pytest.mark.parametrize(
    ("size", "bits", "once"),
    pairwise(formats([(96, 576, 32), (100, 96, 16), (20, 96, 48), (40, 128, 64), (40, 256, 128), (17, 72, 8)])),
    ids=str,
)
def test_matmuls(library: Path, others: dict[str, Library], size: tuple[int, int, int], bits: int, once: str) -> None:
    part, offsets = ONCE[once]
    held, _ = matrix(*size, bits, bool(offsets), zeros=once == "zeros")
    for count in (1, 2, 3, 4, 5, 8, 13, 16, 150):
        x = np.random.default_rng(count).normal(0, 1, (count, size[1])).astype(np.float32)
        given: list[tuple[str, NDArray[Any] | None]] = [("x", x), ("w", held[f"panels{part}"])]
        same_everywhere(
            library,
            others,
            lambda built, given=given: run(
                built, "Linear", given, ["y", "-s"], **attributes(*size, bits, offsets), gated=0
            ),
        )


@pytest.mark.parametrize("count", [4, 37])
def test_matmuls_with_a_gate(library: Path, others: dict[str, Library], count: int) -> None:
    held, _ = matrix(96, 64, 32, 4, offsets=True)
    x = np.random.default_rng(count).normal(0, 1, (count, 64)).astype(np.float32)
    given: list[tuple[str, NDArray[Any] | None]] = [("x", x), ("w", held["gated+offsets"])]
    attrs = attributes(96, 64, 32, 4, 1)
    same_everywhere(library, others, lambda built: run(built, "Linear", given, ["y", "-s"], **attrs, gated=1))


@pytest.mark.parametrize(
    ("size", "bits", "once"), pairwise(formats([(100, 576, 32), (20, 96, 48), (17, 72, 8), (40, 2100, 64)])), ids=str
)
def test_matmuls_of_prompts(
    library: Path, others: dict[str, Library], size: tuple[int, int, int], bits: int, once: str
) -> None:
    part, offsets = ONCE[once]
    held, _ = matrix(*size, bits, bool(offsets), zeros=once == "zeros")
    for count, decoding in ((1, 0), (16, 3), (45, 17)):
        x = np.random.default_rng(count).normal(0, 1, (count, size[1])).astype(np.float32)
        attrs = attributes(*size, bits, offsets)
        same_everywhere(
            library,
            others,
            lambda built, x=x, d=decoding, a=attrs: {"y": matmul(built, x, held[f"panels{part}"], a, decoding=d)},
        )


@pytest.mark.parametrize(("count", "decoding"), [(1, 0), (37, 5)])
def test_what_prompts_hand_on_in_bfloat16(library: Path, others: dict[str, Library], count: int, decoding: int) -> None:
    held, _ = matrix(128, 64, 32, 4, offsets=True)
    x = np.random.default_rng(count).normal(0, 1, (count, 64)).astype(np.float32)

    def handed_on(built: Library) -> Arrays:
        given: Given = [("x", x), ("w", held["gated+offsets"]), ("b", None), ("d", np.array([decoding]))]
        gate = run(built, "Linear", given, ["y", "-s", "words"], **attributes(128, 64, 32, 4, 1), gated=1)
        normed = norm(built, x, decoding, "y", "s", "words")
        return {
            "y": gate["y"][:decoding], "words": rows_of(gate["words"], count - decoding, 64), "s": normed["s"],
            "normed": normed["y"][:decoding], "normed_words": rows_of(normed["words"], count - decoding, 64),
        }  # fmt: skip

    same_everywhere(library, others, handed_on)


@pytest.mark.parametrize("table", list(CODEBOOKS))
def test_matmuls_of_prompts_with_a_table(library: Path, others: dict[str, Library], table: str) -> None:
    held, _ = tabled(100, 96, 16, table)
    attrs = attributes(100, 96, 16, 4, 0, TABLES.index(table))
    x = np.random.default_rng(1).normal(0, 1, (37, 96)).astype(np.float32)
    same_everywhere(library, others, lambda built: {"y": matmul(built, x, held["panels"], attrs)})


def test_matmuls_on_a_team_of_threads(library: Path, others: dict[str, Library]) -> None:
    rows, width, group = 1024, 512, 32
    held, _ = matrix(rows, width, group, 8, offsets=False)
    for count in (1, 70):
        x = np.random.default_rng(count).normal(0, 1, (count, width)).astype(np.float32)
        given: list[tuple[str, NDArray[Any] | None]] = [("x", x), ("w", held["panels"])]

        def on_team(built: Library, given: list[tuple[str, NDArray[Any] | None]] = given) -> Arrays:
            with closing(Team(str(built), 3)) if isinstance(built, Path) else built.team(3):
                return run(built, "Linear", given, ["y", "-s"], **attributes(rows, width, group, 8, 0), gated=0)

        alone = run(library, "Linear", given, ["y", "-s"], **attributes(rows, width, group, 8, 0), gated=0)
        assert alone["y"].tobytes() == on_team(library)["y"].tobytes()
        same_everywhere(library, others, on_team)


def test_quantized_weights_that_are_the_furthest_from_zero(library: Path, others: dict[str, Library]) -> None:
    """Products in 16 bits would overflow here, were they not kept within."""
    for bits in (4, 6, 8):
        held, _ = matrix(32, 256, 64, bits, offsets=True)
        held.quantized[:16], held.quantized[16:] = 0, (1 << bits) - 1
        x = np.where(np.arange(256) % 3 == 0, -1.0, 1.0)[None].astype(np.float32) * np.ones((21, 1), np.float32)
        given: list[tuple[str, NDArray[Any] | None]] = [("x", x), ("w", held["panels+offsets"])]
        attrs = attributes(32, 256, 64, bits, 1)
        same_everywhere(
            library, others, lambda built, g=given, a=attrs: run(built, "Linear", g, ["y", "-s"], **a, gated=0)
        )


@pytest.mark.parametrize("table", list(CODEBOOKS))
def test_quantized_weights_with_a_table(library: Path, others: dict[str, Library], table: str) -> None:
    held, _ = tabled(100, 96, 16, table)
    attrs = attributes(100, 96, 16, 4, 0, TABLES.index(table))
    for count in (1, 2, 3, 8, 13, 37):
        x = np.random.default_rng(count).normal(0, 1, (count, 96)).astype(np.float32)
        given: list[tuple[str, NDArray[Any] | None]] = [("x", x), ("w", held["panels"])]
        same_everywhere(
            library, others, lambda built, given=given: run(built, "Linear", given, ["y", "-s"], **attrs, gated=0)
        )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_attention(library: Path, others: dict[str, Library], case: Any) -> None:
    given = case.inputs()
    same_everywhere(library, others, lambda built: case.run(built, given))


@pytest.mark.parametrize("name", UNLIKE)
def test_attention_to_a_cache_in_8_bits(library: Path, others: dict[str, Library], name: str) -> None:
    case = CODED[name]
    given = case.inputs()
    same_everywhere(library, others, lambda built: case.run(built, given))


@pytest.mark.parametrize("name", ROUNDED)
def test_attention_to_a_cache_in_bfloat16(library: Path, others: dict[str, Library], name: str) -> None:
    """Bits are those of tiles, but in sets with instructions for two or four products: there weights that are rounded
    to 8 bits may be the next ones."""
    case = ROUNDED[name]
    given = case.inputs()
    own = {s.name for s in KERNEL_SETS if s.own_bf16_sums}
    as_tiles = {name: other for name, other in others.items() if name not in own}
    reference = as_tiles.popitem()[1] if own_set().own_bf16_sums else library
    same_everywhere(reference, as_tiles, lambda built: case.run(built, given))
    for other in own & {*others}:
        found, wanted = (case.run(built, given) for built in (others[other], reference))
        apart = np.abs(found.pop("y") - wanted.pop("y"))
        assert apart.max() < 2e-3 and apart.mean() < 2e-5
        assert all((x == wanted[output]).all() for output, x in found.items()), "a cache holds what was given"


def test_in_each_set_a_token_gets_the_same_whatever_it_is_computed_with(others: dict[str, Library]) -> None:
    together = ROUNDED["rows of several tiles"]
    given = together.inputs()
    slot, past, first, count = (int(x) for x in given["rows"][0])
    for name, built in others.items():
        wanted = together.run(built, given)
        kept = {cache: wanted[new] for cache, new in {"past_k": "k16", "past_v": "v16"}.items()}
        for i in (0, 3, count - 1):
            one = given | kept | {"q": given["q"][:, first + i : first + i + 1]}
            one["rows"] = np.array([[slot, past + i, 0, 1]], np.int64)
            created = together.run(built, one)
            assert (created["y"][0, 0] == wanted["y"][0, first + i]).all(), (name, i)


def test_lines_of_a_cache_in_8_bits(library: Path, others: dict[str, Library]) -> None:
    x = unlike(37)[None]
    case = Coded(1, 1, 37, [(0, 3, x.shape[1])], packed=False, turned=0)
    given = case.inputs() | {"k": x, "v": x}
    same_everywhere(library, others, lambda built: {name: case.run(built, given)[name] for name in CACHES.values()})


@pytest.mark.parametrize("name", ALL)
def test_states(library: Path, others: dict[str, Library], name: str) -> None:
    kind, given = name.split(maxsplit=1)[0], ALL[name](19)
    fed, attrs = ends_met(kind, named(kind, given))
    same_everywhere(library, others, lambda built: dict(zip("ys", computed(built, kind, fed, attrs), strict=True)))


@pytest.mark.parametrize("offsets", [False, True])
def test_experts_norms_and_embeddings(library: Path, others: dict[str, Library], offsets: bool) -> None:
    layer = Layer(bits=4, offsets=offsets)
    same_everywhere(library, others, lambda built: {"y": layer.run(built, *step(9))})
    random = np.random.default_rng(0)
    x, residual = random.normal(0, 1, (2, 5, 83)).astype(np.float32)
    for r in (residual, None):
        given: list[tuple[str, NDArray[Any] | None]] = [("x", x), ("r", r), ("w", x[0])]
        same_everywhere(library, others, lambda built, g=given: run(built, "AddNorm", g, ["y", "sum"], eps=1e-5))
    held, _ = matrix(20, 96, 32, 4, offsets)
    requested: list[tuple[str, NDArray[Any] | None]] = [
        ("ids", np.arange(20)), ("w", held["panels+offsets" if offsets else "panels"]),
    ]  # fmt: skip
    attrs = attributes(20, 96, 32, 4, int(offsets))
    same_everywhere(library, others, lambda built: run(built, "Embedding", requested, ["y"], **attrs))


def test_adapters(library: Path, others: dict[str, Library]) -> None:
    inputs = test_adapted.given(11, 83, 90)
    same_everywhere(library, others, lambda built: {"y": test_adapted.built(built, inputs)})
