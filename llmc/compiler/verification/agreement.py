"""Verify a finished bundle: its executables give the results of the portable ones that they were built from.

No checkpoint is needed: the portable executables, which were verified against the reference model, are the reference.
Both replay the same steps over the same past, with NaN in the unused cache and random pad tokens. They must agree
within the limits of the bundle's formats.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.verification.passages import long_text
from llmc.compiler.verification.probes import LONGEST, PROMPTS, Probe, positions_of
from llmc.compiler.verification.steps import empty
from llmc.compiler.verification.verify import NAN, Prefixes, ReplayedRow, Verification
from llmc.errors import ArtifactError
from llmc.runtime.bundle import Bundle
from llmc.runtime.executors.base import Executor
from llmc.runtime.step import Step


class Agreement(Verification):
    """The checks of an opened finished bundle against its opened portable half, bucket by bucket."""

    def __init__(self, bundle: Bundle, executor: Executor, half: Bundle, portable: Executor, beyond: int) -> None:
        probes = texts(bundle)
        super().__init__(bundle, executor, probes, [], beyond, ())
        self._trusted = Verification(half, portable, probes, [], beyond, ())
        self._expected: dict[ReplayedRow, NDArray[np.float32]] = {}

    def _replay(self, step: Step, live: list[ReplayedRow], prefixes: Prefixes, nan_fill: float) -> NDArray[np.float32]:
        if np.isnan(nan_fill):
            self._expected = dict(zip(live, self._trusted._replay(step, live, prefixes, NAN), strict=True))
            empty(self._trusted.executor)
        return super()._replay(step, live, prefixes, nan_fill)

    def _wanted(self, row: ReplayedRow) -> NDArray[np.float32]:
        return self._expected[row]


def texts(bundle: Bundle) -> Sequence[Probe]:
    """The sequences that rows are cut from, the long one last: llmc's own texts with the bundle's tokenizer, or
    pseudo-random ids without one.

    They have no logits; the portable executables compute those.
    """
    limits, vocab_size = bundle.plan.limits, bundle.size("vocab_size")
    farthest = max(1, min(LONGEST, limits.max_model_len - 1))
    try:
        encode = bundle.tokenizer.encode
        found = [*(encode(text) for text in PROMPTS), long_text(encode, farthest)]
    except ArtifactError:
        found = []
    random = np.random.default_rng(0)
    if not found or len(found[-1]) < farthest:
        found = [random.integers(0, vocab_size, length).tolist() for length in (8, 21, 12, 30, 17, 5, farthest)]
    cut = [tokens[: limits.longest_prompt + 1] for tokens in found[:-1]] + [found[-1]]
    return [
        Probe(np.array(tokens, np.int64), len(tokens), np.array(positions_of(len(tokens), ()), np.int64), _NONE)
        for tokens in cut if tokens
    ]  # fmt: skip


_NONE: NDArray[np.float32] = np.zeros((0, 0), np.float32)
