"""The token sequences that verification runs, and the reference's logits at chosen positions of them.

Probes are short prompts that the reference continues greedily. They are cut to leave even a short plan room for the
continuation. Lengths and continuations are ragged: a batch of probes shrinks from its first slot on, which makes the
sequences behind it move. One long sequence (texts.py) reaches the plan's long buckets. It is as long as the plan
allows and the reference can run within REFERENCE_WORK (2,048 tokens within LONGEST_WORK). It always goes beyond a
sliding window and the positions where rotary scaling begins. Texts are llmc's own; a checkpoint without a tokenizer
gets pseudo-random ids.

A window is one sequence of a part of the accuracy text (texts.py), as long as the plan allows, with the reference's
predictions after its tokens. A part has an equal share of TOKENS, or of
fewer for a large model (`text_tokens`). Its positions start at the FIRST-th token. A prediction [V] is kept as gaps:
how far each logit lies below the largest, in steps of STEP nats, 16 bits a token. Rounding to a step has variance STEP²
/ 12. That adds half as much to a divergence, about 1e-8 nats, and moves a larger one by a thousandth. Large
vocabularies keep every second or third position, which limits all gaps to about 2 · GAPS bytes. A checkpoint without a
tokenizer, or with one that hardly knows the text, gets pseudo-random ids.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmc.artifacts.digest import digest_bytes
from llmc.artifacts.key import canonical_json
from llmc.compiler.checkpoint.base import Checkpoint
from llmc.compiler.verification.parts import LEAST
from llmc.compiler.verification.texts import TEXTS, long_text
from llmc.errors import CheckpointError, VerificationError

T = TypeVar("T")

CONTINUATIONS = (range(6, 17, 2), range(3, 9))
"""Continuation tokens of each of PROMPTS, and shorter ones where the reference would exceed GREEDY_WORK: each token
reads all weights, of a large model from its files."""

GREEDY_WORK = 1e12
"""Floating-point operations that the reference may take for continuations, each token counted as LEAST of them."""

LONGEST = 2048
"""Tokens of the long sequence where the plan allows as many, and the reference runs them within LONGEST_WORK; more
where they cost little or the model turns later."""

LEAST_LONG = 1024
"""Tokens of the long sequence of a model of any size."""

LONGEST_WORK = 1e13
"""Floating-point operations that the reference may take for LONGEST tokens: some two minutes on two cores."""

FARTHEST = 8192
"""Most tokens of the long sequence."""

REFERENCE_WORK = 2e12
"""Floating-point operations that a longer sequence than LONGEST may take: some twenty seconds on two cores."""

BEYOND = 128
"""Tokens of the long sequence after a model's turn."""
PROMPTS = (
    "The lighthouse keeper wrote in his journal that",
    'def area(width, height):\n    """Area of a rectangle."""\n    return',
    "Three facts about the planet Mars:\n1.",
    "Q: A shop sells pens at 4 coins each and a notebook at 9 coins. What do 5 pens and 2 notebooks cost?\nA:",
    "Dear Ms. Okafor,\n\nThank you for your letter of 12 March. We are pleased to",
    "El río cruza la ciudad y",
)


class LogitReference(Protocol):
    """A trusted implementation of the model."""

    def together(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Run all calls of the methods below; weights that are read as the model runs are read once for all."""
        return [call() for call in calls]

    def logits(self, tokens: Sequence[int], positions: Sequence[int]) -> NDArray[np.float32]:
        """Logits after each of `positions` of one unpadded sequence, [len(positions), V]."""

    def continued(self, prompt: Sequence[int], count: int) -> tuple[list[int], NDArray[np.float32]]:
        """The `count` tokens of greedy decoding, which no end token stops, and the logits [count, V] that each was
        taken from."""

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The tokens of greedy decoding."""
        return self.continued(prompt, count)[0]


@dataclass(frozen=True)
class Probe:
    """A sequence, its prompt length, and the reference's logits [n, V] after `positions`, with one of the bundle's
    adapters, or none (0)."""

    tokens: NDArray[np.int64]
    prompt_length: int
    positions: NDArray[np.int64]
    logits: NDArray[np.float32]
    adapter: int = 0

    @property
    def continuation(self) -> list[int]:
        """The reference's greedy tokens."""
        return [int(t) for t in self.tokens[self.prompt_length :]]


def make_probes(
    checkpoint: Checkpoint, reference: LogitReference, longest: int, vocab_size: int, farthest: int, adapter: int = 0
) -> list[Probe]:
    """Run the reference, which is the model with `adapter`, over all probe sequences of at most `longest` tokens.

    The long sequence comes last and has at most `farthest` tokens, because decode goes beyond the longest prompt. An
    adapter gets one of the short ones.
    """
    turns, parameters = turns_of(checkpoint.config), parameters_of(checkpoint.config)
    *short, long = _prompts(checkpoint, longest, vocab_size, reach_of(parameters, turns), farthest)
    counts = list(continuations(parameters))
    if adapter:
        at = adapter % len(short)
        short, counts = [short[at]], counts[-1:]
    positions = positions_of(len(long), turns)

    def continued(prompt: list[int], count: int) -> Probe:
        tokens, logits = reference.continued(prompt, max(0, min(count, longest - len(prompt))))
        at = np.arange(len(prompt) - 1, len(prompt) + len(tokens) - 1)
        return Probe(np.array([*prompt, *tokens], np.int64), len(prompt), at, logits, adapter)

    def whole() -> Probe:
        logits = reference.logits(long, positions)
        return Probe(np.array(long, np.int64), len(long), np.array(positions, np.int64), logits, adapter)

    return reference.together(
        [*(partial(continued, *requested) for requested in zip(short, counts, strict=True)), whole]
    )


def continuations(parameters: int) -> range:
    """Lengths of the continuations of PROMPTS, ascending, for a model of `parameters` weights."""
    usual, fewer = CONTINUATIONS
    return usual if sum(usual) * 2.0 * parameters * LEAST <= GREEDY_WORK else fewer


def turns_of(config: Mapping[str, Any]) -> list[int]:
    """Positions up to a bound where a model's behaviour changes: a sliding window ends, or rotary scaling begins."""
    rope = config.get("rope_parameters") or {}
    ropes = [
        rope,
        *(part for part in rope.values() if isinstance(part, Mapping)),
    ]  # one rope per layer type, or one for all
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    found = [window, *(part.get("original_max_position_embeddings") for part in ropes)]
    return sorted({turn for turn in found if type(turn) is int and 0 < turn <= FARTHEST - BEYOND})


def parameters_of(config: Mapping[str, Any]) -> int:
    """Approximate number of weights that a token is multiplied with, without experts that it does not use."""
    hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
    layer = 4 * hidden + 3 * int(config.get("intermediate_size", 0))
    return hidden * (int(config["vocab_size"]) + layers * layer)


def reach_of(parameters: int, turns: Sequence[int]) -> int:
    """Tokens of the long sequence, if the plan allows them, for a model of `parameters` weights with these turns."""
    token = 2 * max(1, parameters)
    long = max(LEAST_LONG, min(LONGEST, int(LONGEST_WORK / token)), int(REFERENCE_WORK / token))
    return min(FARTHEST, max([long, *(turn + BEYOND for turn in turns)]))


def around(turns: Sequence[int]) -> set[int]:
    """Positions before, at and beyond each turn."""
    return {position for turn in turns for position in (turn - 1, turn, turn + 1, turn + turn // 2)}


def positions_of(length: int, turns: Sequence[int]) -> list[int]:
    """Positions of the long sequence that are compared.

    They are the first ones and ever fewer of the later ones; the last of a prompt and the one after it where buckets
    end, which is at powers of two and multiples of 128 or more; those around each turn; and the end.
    """
    step = 128 * -(-length // (16 * 128))
    wanted = {0, 1, 2, 5, 9, length - 2, length - 1}
    ends = {*range(step, length + 1, step), *(1 << bits for bits in range(3, length.bit_length()))}
    wanted |= ends | {end - 1 for end in ends} | around(turns)
    wanted |= {int(p) for p in np.geomspace(13, max(13, length - 1), 24)}
    return sorted(p for p in wanted if 0 <= p < length)


def _prompts(checkpoint: Checkpoint, longest: int, vocab_size: int, reach: int, farthest: int) -> list[list[int]]:
    try:
        from llmc.runtime.text.tokenizer import Tokenizer

        encode = Tokenizer(checkpoint.tokenizer_json()).encode
        texts = [encode(t) for t in PROMPTS]
        long = long_text(encode, reach)
    except CheckpointError:
        random = np.random.default_rng(0)
        texts = [random.integers(0, vocab_size, n).tolist() for n in (8, 21, 12, 30, 17, 5)]
        long = random.integers(0, vocab_size, reach).tolist()
    if len(long) < reach:  # the tokenizer gives too few tokens for any text
        long = np.random.default_rng(0).integers(0, vocab_size, reach).tolist()
    room = max(longest // 2, longest - CONTINUATIONS[0][-1])
    return [*(t[: max(1, room - i)] for i, t in enumerate(texts)), long[: max(1, farthest)]]


def save_probes(probes: Sequence[Probe]) -> bytes:
    """Save probes as an npz file."""
    arrays: dict[str, NDArray[np.float32] | NDArray[np.int64]] = {}
    for i, p in enumerate(probes):
        arrays |= {
            f"{i}.tokens": p.tokens, f"{i}.prompt": np.array([p.prompt_length]),
            f"{i}.positions": p.positions, f"{i}.logits": p.logits, f"{i}.adapter": np.array([p.adapter]),
        }  # fmt: skip
    out = io.BytesIO()
    np.savez(out, **arrays)  # type: ignore[arg-type]
    return out.getvalue()


def load_probes(arrays: Mapping[str, NDArray[np.float32]]) -> list[Probe]:
    """Load the opened npz of `save_probes`."""
    count = sum(name.endswith(".tokens") for name in arrays)
    return [
        Probe(arrays[f"{i}.tokens"].astype(np.int64), int(arrays[f"{i}.prompt"][0]),
              arrays[f"{i}.positions"].astype(np.int64), arrays[f"{i}.logits"], int(arrays[f"{i}.adapter"][0]))
        for i in range(count)
    ]  # fmt: skip


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
