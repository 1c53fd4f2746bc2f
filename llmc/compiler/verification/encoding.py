"""Verification of encoders: vectors and scores against unbatched transformers, and independence of padding.

The reference is the checkpoint's own model in float32, one text at a time without padding, with transformers' own masks
and positions. Rows of all lengths of the plan's buckets are checked, with different lengths in one batch. Each batch
runs twice, with different ids in its padding, and must give the same numbers.

The reference of the toy that embeds or scores is its definition (targets/encoders/fake.py), token by token. It shares
nothing with the fake encoder, not even constants, which keeps a mistake there from being repeated here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmc.errors import VerificationError
from llmc.runtime.executors.base import LENGTHS, TOKEN_IDS, TYPE_IDS

if TYPE_CHECKING:
    from llmc.buckets.encoding import EncodePlan
    from llmc.compiler.checkpoint.base import Checkpoint
    from llmc.runtime.executors.encoders import Encoder


def encoder_reference(checkpoint: Checkpoint, task: str, judges: tuple[int, int] | None) -> Reference:
    """(ids [T], segments [T]) → states [T, H], or logits [labels]. Raises CheckpointError."""
    import torch

    from llmc.compiler.frontend.encode import Encode

    model = Encode(checkpoint, task, judges)  # type: ignore[arg-type] # a Task by its caller

    def run(ids: NDArray[np.int64], types: NDArray[np.int64]) -> NDArray[np.float32]:
        segments = torch.from_numpy(types[None]) if model.typed else None
        with torch.no_grad():
            found: NDArray[np.float32] = model.unpadded(torch.from_numpy(ids[None]), segments)[0].float().numpy()
        return found

    return run


_DECAY = -0.9


def toy_encoder(checkpoint: Checkpoint, task: str) -> Reference:
    """(ids [T], segments [T]) → states [T, H], or logits [labels] to score."""
    embedding = checkpoint.tensor("model.embed_tokens.weight").astype(np.float64)
    head = checkpoint.tensor("lm_head.weight").astype(np.float64)
    positions = int(checkpoint.config["max_position_embeddings"])
    labels = int(checkpoint.config.get("num_labels", 2))

    def run(ids: NDArray[np.int64], types: NDArray[np.int64]) -> NDArray[np.float32]:
        vectors = [(1 + at / positions) * embedding[token] for at, token in enumerate(ids)]
        before, after = _faded(vectors), _faded(vectors[::-1])[::-1]
        states = np.array([b + a - v for b, a, v in zip(before, after, vectors, strict=True)])
        found = states if task == "embed" else head[:labels] @ states[0]
        return found.astype(np.float32)

    return run


def _faded(vectors: list[NDArray[np.float64]]) -> list[NDArray[np.float64]]:
    """For each vector, the sum of it and all earlier ones, each decayed by its distance."""
    found: list[NDArray[np.float64]] = []
    for vector in vectors:
        found.append(vector + _DECAY * found[-1] if found else vector)
    return found


SAMPLED, MOST_TOKENS = 6, 4096
"""Number of buckets in a sample, and the most tokens of its buckets."""
LEAST_COSINE = {"exact": 0.99999, "bf16": 0.999, "int8": 0.99}
"""Least cosine between a state (or logits) of a live token and the reference's, by the formats of a bundle: a choice.
Tiny random models of every architecture had at least 0.999999 in float32; states in bf16 and int8 were not measured
separately."""
MOST_LEAK = 1e-5
"""Largest difference from other padding, relative to the largest number of the row."""

Reference = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.float32]]
"""(token ids [T], segment ids [T]) → states [T, H] or logits [labels], float32."""


@dataclass(frozen=True)
class EncodingOutcome:
    """The worst values over all checked rows."""

    buckets: int
    planned: int
    rows: int
    cosine: float
    leak: float

    def to_json(self) -> dict[str, Any]:
        """The outcome for the manifest."""
        return asdict(self)


def verify_encoder(
    encoder: Encoder, reference: Reference, plan: EncodePlan, vocab_size: int, quality: str, every: bool,
    progress: Callable[[int, int], None],
) -> EncodingOutcome:  # fmt: skip
    """Run `plan`'s buckets, all or a sample. Raises VerificationError beyond the limits of `quality`, naming bucket and
    row."""
    shapes = list(_sampled(plan, every))
    random = np.random.default_rng(0)
    worst, leak, rows = 1.0, 0.0, 0
    for done, (batch, tokens) in enumerate(shapes, 1):
        lengths = np.sort(random.integers(1, tokens + 1, batch))
        lengths[-1] = tokens
        ids = random.integers(0, vocab_size, (batch, tokens))
        types = np.zeros_like(ids)
        if encoder.type_ids:
            types = (np.arange(tokens) >= (lengths[:, None] + 1) // 2).astype(np.int64)
        found = _run(encoder, ids, types, lengths)
        padding = np.arange(tokens) >= lengths[:, None]
        other = _run(encoder, np.where(padding, random.integers(0, vocab_size, ids.shape), ids), types, lengths)
        for row, length in enumerate(lengths):
            live = slice(0, length) if found.ndim == 3 else slice(None)
            mine, again = found[row][live], other[row][live]
            wanted = reference(ids[row, :length], types[row, :length])
            near = _cosine(mine, wanted)
            worst, rows = min(worst, near), rows + 1
            leak = max(leak, float(np.abs(mine - again).max() / max(float(np.abs(mine).max()), 1e-9)))
            where = f"batch {batch} of {tokens} tokens, row {row} of {length} tokens"
            if not near >= LEAST_COSINE[quality]:
                raise VerificationError(
                    f"{where}: cosine {near:.6f} to the reference, the limit for {quality} is {LEAST_COSINE[quality]}"
                )
            if not leak <= MOST_LEAK:
                raise VerificationError(f"{where}: the ids in padding change its numbers by {leak:.2g}")
        progress(done, len(shapes))
    return EncodingOutcome(len(shapes), len(plan.buckets), rows, worst, leak)


def _sampled(plan: EncodePlan, every: bool) -> Iterator[tuple[int, int]]:
    shapes = [(b.batch, b.query) for b in plan.buckets]
    if every or len(shapes) <= SAMPLED:
        yield from shapes
        return
    small = [s for s in shapes if s[0] * s[1] <= MOST_TOKENS] or shapes[:1]
    yield from (small[round(i * (len(small) - 1) / (SAMPLED - 1))] for i in range(SAMPLED))


def _run(
    encoder: Encoder, ids: NDArray[np.int64], types: NDArray[np.int64], lengths: NDArray[np.int64]
) -> NDArray[np.float32]:
    inputs = {TOKEN_IDS: ids, LENGTHS: lengths, **({TYPE_IDS: types} if encoder.type_ids else {})}
    return encoder.encode(inputs).copy()


def _cosine(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """Least cosine of a row of `a` to its row of `b`; for single numbers, 1 − their difference over 1 + |b|."""
    if a.shape[-1] == 1:
        return float((1 - np.abs(a - b) / (1 + np.abs(b))).min())
    norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    return float(((a * b).sum(-1) / np.maximum(norms, 1e-12)).min())
