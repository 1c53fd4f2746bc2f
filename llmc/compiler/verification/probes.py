"""The token sequences that verification runs, and the reference's logits at chosen positions of them.

Probes are short prompts, continued greedily by the reference itself, and cut so that a short plan too has room to
continue them. Lengths and continuations are ragged: a batch of probes shrinks from its first slot on, so that the
sequences behind it must move. One long sequence reaches the plan's long buckets. Texts are llmc's own; a checkpoint
without a tokenizer gets pseudo-random ids instead.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.checkpoint.base import Checkpoint
from llmc.errors import CheckpointError

VERSION = 1
CONTINUATION = 16
LONGEST = 2048
PROMPTS = (
    "The lighthouse keeper wrote in his journal that",
    'def area(width, height):\n    """Area of a rectangle."""\n    return',
    "Three facts about the planet Mars:\n1.",
    "Q: A shop sells pens at 4 coins each and a notebook at 9 coins. What do 5 pens and 2 notebooks cost?\nA:",
    "Dear Ms. Okafor,\n\nThank you for your letter of 12 March. We are pleased to",
    "El río cruza la ciudad y",
)
LONG_TEXT = (
    "A river port grows where goods must change their carrier. Barges bring grain, timber and stone as far as "
    "the water is deep enough; from there on carts take over, and where carts wait there are stables, inns and "
    "smiths. In 1342 the council of one such port counted 41 cranes, 17 of them driven by men walking inside a "
    "wheel. A crane's fee was 2 pence a barrel, 5 for a millstone, and nothing for salt, since the salt "
    'belonged to the bishop. The account books list every load: "item, 12 barrels of herring, 3 of them '
    'spoiled"; "item, 1 bell, cracked". When the river moved its bed eastward after the flood, the cranes '
    "stood dry, and within a generation the inns had become farms. def toll(barrels, stones, salt=0):\n    "
    "return 2 * barrels + 5 * stones  # salt is free\n\nWhat remains is a street named after the wheel, and a "
    'habit of speech: people here still say that something is "as slow as the herring crane". '
)


class Reference(Protocol):
    """A trusted implementation of the model."""

    def logits(self, tokens: Sequence[int], positions: Sequence[int]) -> NDArray[np.float32]:
        """Logits after each of `positions` of one unpadded sequence, [len(positions), V]."""

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The `count` tokens that greedy decoding produces, stopping at no end token."""


@dataclass(frozen=True)
class Probe:
    """A sequence, the length of its prompt, and the reference's logits after `positions` of it, [n, V]."""

    tokens: NDArray[np.int64]
    prompt_length: int
    positions: NDArray[np.int64]
    logits: NDArray[np.float32]

    @property
    def continuation(self) -> list[int]:
        """The reference's greedy tokens."""
        return [int(t) for t in self.tokens[self.prompt_length :]]


def make_probes(checkpoint: Checkpoint, reference: Reference, longest: int, vocab_size: int) -> list[Probe]:
    """Run the reference over all probe sequences of at most `longest` tokens; the long sequence comes last."""
    prompts = _prompts(checkpoint, longest, vocab_size)
    probes = []
    for left, prompt in zip(range(len(prompts) - 2, -1, -1), prompts, strict=False):
        count = max(0, min(CONTINUATION - 2 * left, longest - len(prompt)))
        tokens = [*prompt, *reference.greedy(prompt, count)]
        probes.append(_probe(reference, tokens, len(prompt), range(len(prompt) - 1, len(tokens) - 1)))
    long = prompts[-1]
    wanted = {0, 1, 2, 5, 9} | {int(p) for p in np.geomspace(13, max(13, len(long) - 1), 24)}
    probes.append(_probe(reference, long, len(long), sorted(p for p in wanted if p < len(long))))
    return probes


def _probe(reference: Reference, tokens: Sequence[int], prompt_length: int, positions: Sequence[int]) -> Probe:
    at = list(positions)
    return Probe(np.array(tokens, np.int64), prompt_length, np.array(at, np.int64), reference.logits(tokens, at))


def _prompts(checkpoint: Checkpoint, longest: int, vocab_size: int) -> list[list[int]]:
    try:
        from llmc.runtime.tokenizer import Tokenizer

        encode = Tokenizer(checkpoint.tokenizer_json()).encode
        texts = [encode(t) for t in PROMPTS]
        long = encode(LONG_TEXT)
    except CheckpointError:
        random = np.random.default_rng(0)
        texts = [random.integers(0, vocab_size, n).tolist() for n in (8, 21, 12, 30, 17, 5)]
        long = random.integers(0, vocab_size, 256).tolist()
    limit = max(1, longest - 1)
    room = max(longest // 2, longest - CONTINUATION)
    long = (long * (min(LONGEST, limit) // len(long) + 1))[: min(LONGEST, limit)]
    return [*(t[: max(1, room - i)] for i, t in enumerate(texts)), long]


def save_probes(probes: Sequence[Probe]) -> bytes:
    """Probes as an npz file."""
    arrays: dict[str, NDArray[np.float32] | NDArray[np.int64]] = {}
    for i, p in enumerate(probes):
        arrays |= {
            f"{i}.tokens": p.tokens, f"{i}.prompt": np.array([p.prompt_length]),
            f"{i}.positions": p.positions, f"{i}.logits": p.logits,
        }  # fmt: skip
    out = io.BytesIO()
    np.savez(out, **arrays)  # type: ignore[arg-type]
    return out.getvalue()


def load_probes(arrays: Mapping[str, NDArray[np.float32]]) -> list[Probe]:
    """The inverse of `save_probes`, from the opened npz."""
    count = sum(name.endswith(".tokens") for name in arrays)
    return [
        Probe(arrays[f"{i}.tokens"].astype(np.int64), int(arrays[f"{i}.prompt"][0]),
              arrays[f"{i}.positions"].astype(np.int64), arrays[f"{i}.logits"])
        for i in range(count)
    ]  # fmt: skip
