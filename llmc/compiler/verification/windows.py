"""Windows of the text of texts.py, and the reference's predictions after their tokens.

A window is one sequence of a part of the text, as long as the plan allows. A part has an equal share of TOKENS, or of
fewer for a large model (`text_tokens`). Its positions start at the FIRST-th token. A prediction [V] is kept as gaps:
how far each logit lies below the largest, in steps of STEP nats, 16 bits a token. Rounding to a step has variance STEP²
/ 12. That adds half as much to a divergence, about 1e-8 nats, and moves a larger one by a thousandth. Large
vocabularies keep every second or third position, which limits all gaps to about 2 · GAPS bytes. A checkpoint without a
tokenizer, or with one that hardly knows the text, gets pseudo-random ids.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.artifacts.digest import digest_bytes
from llmc.artifacts.key import canonical_json
from llmc.compiler.checkpoint.base import Checkpoint
from llmc.compiler.verification.probes import CONTINUATIONS, LogitReference, continuations, parameters_of
from llmc.compiler.verification.texts import TEXTS
from llmc.errors import CheckpointError, VerificationError

TOKENS = 512
LEAST_TOKENS = 256
"""Tokens of the text for a model of any size."""
TEXT_WORK = 5e11
"""Floating-point operations of one run over more tokens than these: some five seconds on two cores."""
FIRST = 8
GAPS = 1 << 25
STEP = 2.0**-11
UNLIKELY = 2**16 - 1
"""Gap of tokens 32 nats or more below the best, whose probability of at most 1e-14 counts as none."""


@dataclass(frozen=True)
class TextWindow:
    """Tokens [n] of a part of the text, and the reference's gaps [len(positions), V] after some positions of them.

    Positions are ascending and evenly spaced; the tokens up to the first of them are a prompt's least tokens.
    """

    part: str
    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    gaps: NDArray[np.uint16]

    def gaps_after(self, position: int) -> NDArray[np.uint16] | None:
        """The reference's gaps [V] after token `position`; None where they are not kept."""
        at = int(np.searchsorted(self.positions, position))
        return self.gaps[at] if at < len(self.positions) and self.positions[at] == position else None


def make_windows(checkpoint: Checkpoint, reference: LogitReference, longest: int, vocab_size: int) -> list[TextWindow]:
    """Run the reference over the text, in windows of at most `longest` tokens (2 or more).

    Raises VerificationError where the reference's logits contain NaN or infinity.
    """
    first = min(FIRST, longest // 2)
    cut = [
        (part, tokens[start : start + longest])
        for part, tokens in parts_of(checkpoint, vocab_size)
        for start in range(0, len(tokens), longest)
        if len(tokens[start : start + longest]) > first
    ]
    stride = -(-sum(len(tokens) - first + 1 for _, tokens in cut) * vocab_size // GAPS)
    positions = [range(first - 1, len(tokens), stride) for _, tokens in cut]
    calls = [partial(_gaps_of, reference, tokens, at) for (_, tokens), at in zip(cut, positions, strict=True)]
    return [
        TextWindow(part, np.array(tokens, np.int64), np.array(at, np.int64), gaps)
        for (part, tokens), at, gaps in zip(cut, positions, reference.together(calls), strict=True)
    ]


def text_tokens(parameters: int) -> int:
    """Tokens of the text for a model of `parameters` weights."""
    return max(LEAST_TOKENS, min(TOKENS, int(TEXT_WORK / (2 * max(1, parameters)))))


def shortened(checkpoint: Checkpoint) -> dict[str, dict[str, int]]:
    """Manifest entry for a model that is too large for all tokens: the most tokens of "text" and of "greedy" texts, and
    "of" how many; empty for others."""
    parameters = parameters_of(checkpoint.config)
    usual, built = sum(CONTINUATIONS[0]), sum(continuations(parameters))
    found = {"text": (text_tokens(parameters), TOKENS), "greedy": (built, usual)}
    return {name: {"tokens": tokens, "of": every} for name, (tokens, every) in found.items() if tokens < every}


def parts_of(checkpoint: Checkpoint, vocab_size: int) -> list[tuple[str, list[int]]]:
    """Each part of the text with its tokens, more than FIRST."""
    share = text_tokens(parameters_of(checkpoint.config)) // len(TEXTS)
    try:
        from llmc.runtime.text.tokenizer import Tokenizer

        encode = Tokenizer(checkpoint.tokenizer_json()).encode
        parts = [(part, encode(text)[:share]) for part, text in TEXTS.items()]
    except CheckpointError:
        parts = []
    if parts and all(len(tokens) > FIRST for _, tokens in parts):
        return parts
    random = np.random.default_rng(0)
    return [("random", random.integers(0, vocab_size, share).tolist()) for _ in TEXTS]


def _gaps_of(reference: LogitReference, tokens: Sequence[int], positions: Sequence[int]) -> NDArray[np.uint16]:
    return _gaps(reference.logits(tokens, positions))


def _gaps(logits: NDArray[np.float32]) -> NDArray[np.uint16]:
    best = logits.max(-1, keepdims=True)
    if not np.isfinite(best).all():
        raise VerificationError(
            "the reference model's logits contain NaN or infinity: its weights are damaged, or too large for float32; "
            "download the checkpoint again"
        )
    gaps: NDArray[np.uint16] = np.minimum(np.rint((best - logits) / np.float32(STEP)), UNLIKELY).astype(np.uint16)
    return gaps


def text_digest(windows: Sequence[TextWindow], read: Sequence[Sequence[int]]) -> str:
    """Digest of the token ids and of the positions that were read: figures with equal digests can be compared."""
    return digest_bytes(canonical_json([[w.tokens.tolist(), list(at)] for w, at in zip(windows, read, strict=True)]))


def by_part(windows: Sequence[TextWindow]) -> list[tuple[str, list[int]]]:
    """Parts, in order, with the indices of their windows."""
    return [(part, list(at)) for part, at in groupby(range(len(windows)), lambda i: windows[i].part)]


def save_windows(windows: Sequence[TextWindow]) -> bytes:
    """Save windows as an npz file."""
    arrays: dict[str, NDArray[Any]] = {}
    for i, w in enumerate(windows):
        arrays |= {
            f"{i}.part": np.array(w.part), f"{i}.tokens": w.tokens, f"{i}.positions": w.positions, f"{i}.gaps": w.gaps,
        }  # fmt: skip
    out = io.BytesIO()
    np.savez(out, **arrays)  # type: ignore[arg-type]
    return out.getvalue()


def load_windows(arrays: Mapping[str, NDArray[Any]]) -> list[TextWindow]:
    """Load the opened npz of `save_windows`."""
    count = sum(name.endswith(".tokens") for name in arrays)
    return [
        TextWindow(str(arrays[f"{i}.part"]), arrays[f"{i}.tokens"], arrays[f"{i}.positions"], arrays[f"{i}.gaps"])
        for i in range(count)
    ]
