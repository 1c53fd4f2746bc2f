"""Ragged rows through a traced program, step by step, over a poisoned cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch

from llmc.compiler.architectures.shared.caches import cache_of
from llmc.compiler.frontend.trace import trace_weightless
from llmc.compiler.program.to_export import serialise, specialise
from llmc.runtime.cache_shape import CacheShape
from llmc.runtime.portable_program import PortableProgram, ProgramFields
from tests.compiler import tiny

NAN = float("nan")
ROWS = 4
SPARE, STEP = 2, 8
"""Places of a ring beside its window, and those that steps of up to so many tokens need where they write in place."""

Tensors = list[torch.Tensor]
Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Tensors], Tensors]
"""token_ids, past_lengths, new_lengths, cache → logits and each layer's key and value."""


@cache
def symbolic(case: str, cached: bool) -> ProgramFields:
    """The portable program of every size."""
    return serialise(trace_weightless(tiny.config(case), "two_part", cached=cached).exported)


def ringed(case: str, spare: int) -> CacheShape:
    """The case's cache, windows in rings."""
    return cache_of(tiny.config(case)).in_rings(spare, longest=1 << 20)


@cache
def specialised(case: str, batch: int, query: int, context: int) -> PortableProgram:
    """That of one size."""
    return PortableProgram.of(specialise(symbolic(case, context > 0), batch, query, context, ringed(case, SPARE)))


def two_part_run(case: str) -> Run:
    """Portable programs, one for each size that is asked for."""
    tensors = tiny.tensors(case)
    shape = ringed(case, SPARE)

    def run(token_ids: torch.Tensor, past: torch.Tensor, new: torch.Tensor, kept: Tensors) -> Tensors:
        sizes = [t.shape[2] for said, t in zip(shape, kept, strict=False) if said.kind == "kv"]
        context = max(sizes, default=len(kept))  # states or rings alone are the same whatever the context
        program = specialised(case, *token_ids.shape, context)
        return list(program.run(token_ids, past, new, *kept, *(tensors[n] for n in program.weights)))

    return run


class Replay:
    """Rows of tokens through a program, over caches that hold NaN where no live token is, of `capacity` tokens.

    Pads are random tokens. With `in_place` the program returns its whole cache, else the new tokens alone.
    """

    def __init__(
        self, case: str, run: Run, texts: Sequence[list[int]], *, capacity: int, in_place: bool, rings: bool = True
    ) -> None:
        """`rings`: of windows; else each token has a place of its own."""
        self.run = run
        self.in_place = in_place
        held = ringed(case, STEP if in_place else SPARE)
        self.shape = held if rings else held.without_rings
        self.tokens = texts
        self.expected = [tiny.logits(case, row) for row in texts]
        self.past = [0] * len(texts)
        self.best: list[list[int]] = [[] for _ in texts]
        """The token of the largest logit after each step of a row."""
        self.kept = [torch.full(t.size(len(texts), capacity), NAN) for t in self.shape]
        self.vocab_size = tiny.config(case)["vocab_size"]
        self.random = np.random.default_rng(5)

    def step(self, counts: tuple[int, ...], context: int, query: int | None = None) -> list[float]:
        """Run one step of `counts` live tokens a row, 0 for a dummy; the largest error of each live row's logits."""
        query, rows = query or max(counts), len(counts)
        live = [row for row in range(rows) if counts[row]]
        token_ids = torch.from_numpy(self.random.integers(0, self.vocab_size, (rows, query)))
        past, new = torch.zeros(rows, dtype=torch.long), torch.ones(rows, dtype=torch.long)
        kept = [torch.full_like(t, NAN) for t in self.kept]
        for row in live:
            start, end = self.past[row], self.past[row] + counts[row]
            token_ids[row, : counts[row]] = torch.tensor(self.tokens[row][start:end])
            past[row], new[row] = start, counts[row]
            for given, mine in zip(kept, self.kept, strict=True):
                given[row] = mine[row]
        if not self.in_place:
            given_all = zip(self.shape, kept, strict=True)
            kept = [t[:, :, : s.token_slots(context)] if s.kind == "kv" else t for s, t in given_all] if context else []
        logits, *built = self.run(token_ids, past, new, kept)
        errors = []
        for row in live:
            start, end = self.past[row], self.past[row] + counts[row]
            for shape, mine, tensor in zip(self.shape, self.kept, built, strict=True):
                if shape.kind == "state":
                    mine[row] = tensor[row]
                    continue
                tokens = torch.arange(max(start, end - mine.shape[2]), end)
                offsets = tokens % mine.shape[2]
                mine[row][:, offsets] = tensor[row][:, offsets if self.in_place else tokens - start]
            self.past[row] = end
            self.best[row].append(int(logits[row].argmax()))
            errors.append(float(np.abs(logits[row].numpy() - self.expected[row][end - 1]).max()))
        return errors


def random_texts(case: str, length: int) -> list[list[int]]:
    """Random tokens for each row."""
    random = np.random.default_rng(3)
    return [random.integers(0, tiny.config(case)["vocab_size"], length).tolist() for _ in range(ROWS)]
