"""Operators of layers with a state over rows that lie end to end, against what each operator means row by row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from llmc.compiler.frontend import recurrent
from llmc.compiler.frontend.chunked import NORM_EPS
from tests.compiler.frontend.test_recurrent import (
    CASES,
    GROUPS,
    HEADS,
    PAST,
    ROWS,
    nan_filled,
    new_lengths,
    numbers,
)
from tests.compiler.targets.onnxruntime.kernels.single import Arrays, run

OPS = {"causal_conv": "CausalConv", "gated_delta": "GatedDelta", "state_scan": "StateScan"}
FIXED = {"weight", "bias", "rate"}
"""Arguments without tokens."""
SLOTS = [4, 0, 2]
"""Of the rows, among 6."""


def wide_delta(length: int) -> tuple[Any, ...]:
    """Heads of more columns than a job takes, and keys that fill no register."""
    query, key = (numbers(ROWS, length, GROUPS, 36, seed=seed) for seed in (0, 2))
    state = nan_filled(numbers(ROWS, HEADS, 36, 150, seed=5))
    gates, value = numbers(ROWS, length, HEADS, seed=3), numbers(ROWS, length, HEADS, 150, seed=4)
    return query, key, value, -gates.exp(), gates.sigmoid(), state, PAST, new_lengths(length), True


def wide_scan(length: int, each: bool) -> tuple[Any, ...]:
    """States of more numbers than a job takes; with a rate for each column heads are channels, of one line each."""
    heads, lines, groups = (700, 1, 1) if each else (4, 50, 2)
    size = 16 if each else 72
    x, step = numbers(ROWS, length, heads, lines), numbers(ROWS, length, heads).exp() / 4
    rate = -numbers(*((heads, size) if each else (heads,))).exp()
    write, read = (numbers(ROWS, length, groups, size, seed=seed) for seed in (6, 7))
    state = nan_filled(numbers(ROWS, heads, lines, size, seed=8))
    return x, step, rate, write, read, state, PAST, new_lengths(length)


def wide_conv(length: int) -> tuple[Any, ...]:
    """More channels than a job takes, and more taps than tokens."""
    state = nan_filled(numbers(ROWS, 11, 150, seed=1))
    return numbers(ROWS, length, 150), numbers(150, 12), numbers(150), state, PAST, new_lengths(length), False


ALL = {
    **CASES, "causal_conv of many channels": wide_conv, "gated_delta of wide heads": wide_delta,
    "state_scan of large states": lambda n: wide_scan(n, False), "state_scan of channels": lambda n: wide_scan(n, True),
}  # fmt: skip


def named(kind: str, given: tuple[Any, ...]) -> dict[str, Any]:
    schema = getattr(torch.ops.llmc, kind).default._schema
    return dict(zip([argument.name for argument in schema.arguments], given, strict=True))


def ends_met(kind: str, given: dict[str, Any], spare: int = 0) -> tuple[Arrays, dict[str, Any]]:
    """The operator's inputs with the live tokens of all rows behind each other, `spare` more, and its attributes."""
    live = given["new_lengths"].tolist()
    found: Arrays = {}
    for name, value in given.items():
        if name in ("past_lengths", "new_lengths") or not isinstance(value, torch.Tensor):
            continue
        if name == "state":
            found[name] = np.full((6, *value.shape[1:]), 7.0, np.float32)
            found[name][SLOTS] = value.numpy()
        elif name in FIXED:
            found[name] = value.numpy()
        else:
            tokens = np.concatenate([value[row, :n].numpy() for row, n in enumerate(live)])
            found[name] = np.concatenate([tokens, np.full((spare, *tokens.shape[1:]), np.nan, np.float32)])[None]
    firsts = np.cumsum([0, *live[:-1]])
    found["rows"] = np.array(list(zip(SLOTS, given["past_lengths"].tolist(), firsts, live, strict=True)), np.int64)
    attrs = {name: int(value) for name, value in given.items() if isinstance(value, bool)}
    return found, attrs | ({"eps": NORM_EPS} if kind == "gated_delta" else {})


def computed(library: Path, kind: str, fed: Arrays, attrs: dict[str, Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    inputs: list[tuple[str, NDArray[Any] | None]] = list(fed.items())
    if kind == "causal_conv" and "bias" not in fed:
        inputs.insert(2, ("bias", None))
    built = run(library, OPS[kind], inputs, ["y", "after"], **attrs)
    return built["y"][0], built["after"]


@pytest.mark.parametrize("length", [1, 2, 19])
@pytest.mark.parametrize("name", ALL)
def test_rows_and_their_states_are_as_the_operator_means_them(library: Path, name: str, length: int) -> None:
    kind, given = name.split(maxsplit=1)[0], ALL[name](length)
    wanted, state = getattr(recurrent, kind)(*given)
    y, after = computed(library, kind, *ends_met(kind, named(kind, given), spare=2))
    live = new_lengths(length).tolist()
    tokens = np.concatenate([wanted[row, :n].numpy() for row, n in enumerate(live)])
    np.testing.assert_allclose(y[:-2], tokens, rtol=2e-4, atol=2e-4)
    assert (y[-2:] == 0).all(), "tokens of no row"
    np.testing.assert_allclose(after[SLOTS], state.numpy(), rtol=2e-4, atol=2e-4)
    others = [slot for slot in range(6) if slot not in SLOTS]
    assert (after[others] == 7).all(), "slots of no row"


@pytest.mark.parametrize("name", ALL)
def test_a_row_is_the_same_alone_and_in_pieces(library: Path, name: str) -> None:
    """To the bit: which tokens, and how many, are computed together changes nothing."""
    kind = name.split(maxsplit=1)[0]
    fed, attrs = ends_met(kind, named(kind, ALL[name](9)))
    y, after = computed(library, kind, fed, attrs)
    slot, past, first, count = fed["rows"][2].tolist()
    pieces = []
    for start, end in ((0, 1), (1, 3), (3, count)):
        tokens = {
            key: array[:, first + start : first + end] if key not in FIXED | {"state", "rows"} else array
            for key, array in fed.items()
        }
        tokens["rows"] = np.array([[slot, past + start, 0, end - start]], np.int64)
        built, fed["state"] = computed(library, kind, tokens, attrs)
        pieces.append(built)
    np.testing.assert_array_equal(np.concatenate(pieces), y[first : first + count])
    np.testing.assert_array_equal(fed["state"][slot], after[slot])


@pytest.mark.parametrize("name", ["causal_conv", "gated_delta", "state_scan"])
def test_a_row_without_tokens_keeps_its_state(library: Path, name: str) -> None:
    fed, attrs = ends_met(name, named(name, CASES[name](3)))
    fed["rows"][:, 3] = 0
    _, after = computed(library, name, fed, attrs)
    np.testing.assert_array_equal(after, fed["state"])
