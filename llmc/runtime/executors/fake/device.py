"""The fake device: its variants, and its toy model in numpy, which llmc/compiler/targets/fake.py defines.

The suffix of the device's name selects the variant:

    fake             buckets when specialised, otherwise one sequence's prompt or a token of each of the first slots
    fake:ragged      rows of any lengths in any slots
    fake:paged=N     ragged; all slots share N tokens in blocks of BLOCK_TOKENS
    fake:graphs=N    buckets; it has N bytes of memory, and captures graphs in it
    fake:portable    buckets; executables are portable until a host with a fake GPU compiles them on the target

A target-compiled executable is the portable one with the member "gpu", the name of its fake GPU. A host has none
unless a test adds one (`here`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from llmc.errors import ArtifactError, InputError

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

BLOCK_TOKENS = 4
PORTABLE = "portable"


@dataclass(frozen=True)
class FakeKind:
    """`cache_tokens` of the pool that all slots share, `graph_memory` in bytes; None: not available."""

    ragged: bool = False
    cache_tokens: int | None = None
    graph_memory: int | None = None

    @classmethod
    def of(cls, detail: str) -> FakeKind:
        name, _, text = detail.partition("=")
        number = int(text) if text.isascii() and text.isdecimal() else 0
        if name == "paged" and number >= BLOCK_TOKENS:
            return cls(ragged=True, cache_tokens=number)
        if name == "graphs" and number:
            return cls(graph_memory=number)
        if detail not in ("", PORTABLE, "ragged"):
            raise InputError(
                f"--device fake:{detail}: the suffix may be ragged, paged=N, N tokens from {BLOCK_TOKENS}, "
                f"graphs=N, N bytes of memory, or {PORTABLE}"
            )
        return cls(ragged=detail == "ragged")


@dataclass(frozen=True)
class FakeGpu:
    """A fake GPU and its driver."""

    name: str = "fake-1"
    driver: str = "1.0"


here: FakeGpu | None = None
"""The fake GPU of this host."""


Floats: TypeAlias = "NDArray[np.float32]"
Ints: TypeAlias = "NDArray[np.int64]"

FORMAT = 1
EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


def of_adapter(name: str, number: int) -> str:
    """Name of a tensor with adapter `number` merged into it, or without (0)."""
    return f"{name}@{number}" if number else name


@dataclass(frozen=True)
class FakeProgram:
    """An opened executable: its sizes (None: dynamic), its constants, and its tensors [V, H], mapped read-only.

    `embeddings` and `heads` (lm_head) are without adapters, then with each; `adapters` [B] selects them by row.
    """

    batch: int | None
    query: int | None
    context: int | None
    decay: float
    positions: int
    embeddings: tuple[Floats, ...]
    heads: tuple[Floats, ...]
    top_k: int = 0
    window: int | None = None
    adapters: Ints | None = None

    @classmethod
    def load(cls, fields: dict[str, Any], weights: Path) -> FakeProgram:
        """Parse an executable's JSON and the weights file. Raises KeyError, TypeError or ValueError if malformed."""
        import numpy as np

        if fields["format"] != FORMAT:
            raise ValueError(f"format {fields['format']}, not {FORMAT}")
        tensors = {
            name: np.memmap(weights, np.float32, "r", tensor["offset"], tuple(tensor["shape"]))
            for name, tensor in fields["tensors"].items()
        }
        count = len(tensors) // 2
        embeddings, heads = (tuple(tensors[of_adapter(n, i)] for i in range(count)) for n in (EMBEDDING, LM_HEAD))
        return cls(
            fields["batch"], fields["query"], fields["context"], float(fields["decay"]), int(fields["positions"]),
            embeddings, heads, int(fields.get("sample_top_k", 0)), fields.get("window"),
        )  # fmt: skip

    def replay(self, token_ids: Ints, past_lengths: Ints, new_lengths: Ints, past: Floats) -> tuple[Floats, Floats]:
        """Logits after each row's last live token, [B, V], and the vectors of the new tokens, [B, Q, H].

        token_ids [B, Q], past_lengths [B], new_lengths [B], past [B, context, H], or a ring buffer. Sums are float64,
        so that padding does not change a row's last digits. Raises ArtifactError for sizes other than the compiled
        ones.
        """
        import numpy as np

        self._require_shape((*token_ids.shape, past.shape[1]))
        new_at, offsets = np.arange(token_ids.shape[1]), past.shape[1]
        last_held = past_lengths[:, None] - 1
        past_at = last_held - (last_held - np.arange(offsets)) % max(offsets, 1)
        scale = 1 + (past_lengths[:, None] + new_at) / self.positions
        new = (scale[..., None] * self._embedded(token_ids)).astype(np.float32)
        last = past_lengths + new_lengths - 1
        age, past_age = new_lengths[:, None] - 1 - new_at, last[:, None] - past_at
        seen = np.inf if self.window is None else self.window
        state = _faded(new, (new_at < new_lengths[:, None]) & (age < seen), age, self.decay)
        state += _faded(past, (past_at >= 0) & (past_age < seen), past_age, self.decay)
        return self._logits(state), new

    def advance(self, token_ids: Ints, past_lengths: Ints, new_lengths: Ints, state: Floats) -> tuple[Floats, Floats]:
        """Logits, and the state Σ decay^age · vector of all tokens, [B, H] float32; rows at past 0 start from zeros."""
        import numpy as np

        self._require_shape((*token_ids.shape, self.context or 0))
        new_at = np.arange(token_ids.shape[1])
        scale = 1 + (past_lengths[:, None] + new_at) / self.positions
        new = (scale[..., None] * self._embedded(token_ids)).astype(np.float32)
        summed = _faded(new, new_at < new_lengths[:, None], new_lengths[:, None] - 1 - new_at, self.decay)
        before = np.where(past_lengths[:, None] > 0, state, 0).astype(np.float64)
        summed += np.power(self.decay, new_lengths)[:, None] * before
        return self._logits(summed), summed.astype(np.float32)

    def _embedded(self, token_ids: Ints) -> Floats:
        import numpy as np

        if self.adapters is None:
            return self.embeddings[0][token_ids]
        return np.stack([self.embeddings[a][ids] for a, ids in zip(self.adapters, token_ids, strict=True)])

    def _logits(self, state: NDArray[np.float64]) -> Floats:
        import numpy as np

        if self.adapters is None:
            return (state @ self.heads[0].T.astype(np.float64)).astype(np.float32)
        rows = [one @ self.heads[a].T.astype(np.float64) for a, one in zip(self.adapters, state, strict=True)]
        return np.stack(rows).astype(np.float32)

    def _require_shape(self, given: tuple[int, ...]) -> None:
        compiled = (self.batch, self.query, self.context)
        *_, offsets = given
        if self.window is not None and self.context is not None and offsets < self.context:
            given = (*given[:2], self.context)
        if any(fixed not in (None, size) for fixed, size in zip(compiled, given, strict=True)):
            raise ArtifactError(
                f"an executable compiled for batch, query, context {compiled} was given {given}; compile again"
            )


def _faded(vectors: Floats, live: NDArray[np.bool_], age: Ints, decay: float) -> NDArray[np.float64]:
    """Σ decay^age · vector over live tokens, [B, H], of [B, n, H]. Others are not selected, since they may be NaN."""
    import numpy as np

    weights = np.power(decay, np.maximum(age, 0))
    kept: NDArray[np.float64] = np.where(live[..., None], vectors, 0).astype(np.float64)
    total: NDArray[np.float64] = np.einsum("bn,bnh->bh", weights, kept)
    return total
