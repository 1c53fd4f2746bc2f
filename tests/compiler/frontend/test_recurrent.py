"""Operators of layers with a state: what they mean, and the same from products of matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from llmc.compiler.frontend import chunked, recurrent

ROWS, HEADS, GROUPS, KEY, VALUE = 3, 4, 2, 8, 6
PAST = torch.tensor([5, 0, 3])


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + 17 * len(shape)))


def new_lengths(length: int) -> Tensor:
    return torch.tensor([length, max(1, length - 2), max(1, length // 2)])


def nan_filled(state: Tensor) -> Tensor:
    """The row without a past holds what another sequence left there."""
    state[1] = float("nan")
    return state


def conv(length: int, bias: bool = True) -> tuple[Any, ...]:
    x, weight = numbers(ROWS, length, 10), numbers(10, 4)
    state = nan_filled(numbers(ROWS, 3, 10, seed=1))
    return x, weight, numbers(10) if bias else None, state, PAST, new_lengths(length), True


def delta(length: int, normalise: bool = True) -> tuple[Any, ...]:
    query, key = numbers(ROWS, length, GROUPS, KEY), numbers(ROWS, length, GROUPS, KEY, seed=2)
    key = key / (1 if normalise else 3)
    gates = numbers(ROWS, length, HEADS, seed=3)
    state = nan_filled(numbers(ROWS, HEADS, KEY, VALUE, seed=5))
    value = numbers(ROWS, length, HEADS, VALUE, seed=4)
    return query, key, value, -gates.exp(), gates.sigmoid(), state, PAST, new_lengths(length), normalise


def scan(length: int, each: bool = False) -> tuple[Any, ...]:
    x, step = numbers(ROWS, length, HEADS, VALUE), numbers(ROWS, length, HEADS).exp() / 4
    rate = -numbers(*((HEADS, KEY) if each else (HEADS,))).exp()
    write, read = numbers(ROWS, length, GROUPS, KEY, seed=6), numbers(ROWS, length, GROUPS, KEY, seed=7)
    state = nan_filled(numbers(ROWS, HEADS, VALUE, KEY, seed=8))
    return x, step, rate, write, read, state, PAST, new_lengths(length)


CASES = {
    "causal_conv": conv, "causal_conv without bias": lambda n: conv(n, False),
    "gated_delta": delta, "gated_delta of any length": lambda n: delta(n, False),
    "state_scan": scan, "state_scan with a rate for each column": lambda n: scan(n, True),
}  # fmt: skip


@pytest.mark.parametrize("length", [1, 2, 16, 150])
@pytest.mark.parametrize("name", CASES)
def test_chunks_compute_what_tokens_one_by_one_do(name: str, length: int) -> None:
    given, operator = CASES[name](length), name.split(maxsplit=1)[0]
    wanted, state = getattr(recurrent, operator)(*given)
    out, held = getattr(chunked, operator)(torch, *given)
    for row, live in enumerate(given[-2 if operator != "state_scan" else -1]):
        torch.testing.assert_close(out[row, :live], wanted[row, :live], rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(held, state, rtol=2e-4, atol=2e-4)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("name", CASES)
def test_padding_and_the_states_of_others_change_nothing(name: str) -> None:
    """The second row, alone, without its padding, from a state of zeros."""
    length, operator = 9, name.split(maxsplit=1)[0]
    given = list(CASES[name](length))
    live, run = length - 2, getattr(recurrent, operator)
    out, state = run(*given)
    batched = {"causal_conv": (0, 3), "gated_delta": (0, 1, 2, 3, 4, 5), "state_scan": (0, 1, 3, 4, 5)}[operator]
    alone = [t[1:2] if i in batched or t is PAST else t for i, t in enumerate(given)]
    for i in batched[:-1]:
        alone[i] = alone[i][:, :live]
    alone[batched[-1]] = torch.zeros_like(alone[batched[-1]])
    alone[batched[-1] + 2] = torch.tensor([live])
    expected, kept = run(*alone)
    torch.testing.assert_close(out[1:2, :live], expected)
    torch.testing.assert_close(state[1:2], kept)
