"""The text that 4-bit weights are calibrated by, as tokens.

llmc's own has its passages (verification/passages.py), and passages of Python's manual, which pydoc has. No figure is
taken over it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from llmc.errors import CheckpointError, InputError
from llmc.paths import expanded

if TYPE_CHECKING:
    from llmc.compiler.checkpoint.base import Checkpoint
    from llmc.compiler.weights.sensitivity import Judged

OWN = "own"
"""In place of a file: llmc's own."""
_MOST = 1 << 24
"""Characters of a text, at most."""
_PASSAGE = 1500
"""Characters of a topic of the manual."""


def sequences_in(checkpoint: Checkpoint, given: str) -> list[list[int]]:
    """Those of the text `given` for --calibrate. Raises InputError for one that is too short, or cannot be read,
    CheckpointError for a tokenizer of another model."""
    from llmc.compiler.weights.calibration import TOKENS, sequences_of
    from llmc.runtime.text.tokenizer import Tokenizer

    text = given_text(given)
    encode = Tokenizer(checkpoint.tokenizer_json()).encode
    tokens = _own(encode, TOKENS) if text is None else encode(text)
    found = sequences_of(tokens, _longest(checkpoint))
    if not found:
        raise InputError(f"--calibrate: the text has {len(tokens)} tokens; give one of some thousand")
    known = int(checkpoint.config["vocab_size"])
    if any(token >= known for tokens in found for token in tokens):
        raise CheckpointError(f"{checkpoint.path}: its tokenizer gives ids above the {known} of its embedding")
    return found


def judged_in(checkpoint: Checkpoint) -> Judged:
    """The text of texts.py, which the gate measures the bundle over, too."""
    from llmc.compiler.verification.windows import FIRST, parts_of
    from llmc.compiler.weights.sensitivity import Judged

    parts = parts_of(checkpoint, int(checkpoint.config["vocab_size"]))
    return Judged([part[: _longest(checkpoint)] for _, part in parts], FIRST - 1)


def _longest(checkpoint: Checkpoint) -> int:
    return int(checkpoint.config.get("max_position_embeddings") or 1 << 16)


def given_text(given: str) -> str | None:
    """The text of a file; None for OWN. Raises InputError."""
    if given == OWN:
        return None
    try:
        with expanded(given).open(encoding="utf-8") as file:
            return file.read(_MOST)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"--calibrate {given}: cannot be read as UTF-8 text ({error}); name a file, or {OWN}"
        ) from error


def _own(encode: Callable[[str], list[int]], count: int) -> list[int]:
    """The first `count` tokens of llmc's passages, each once, and of the manual's."""
    from pydoc_data.topics import topics

    from llmc.compiler.verification.passages import PASSAGES

    manual = [text[:_PASSAGE] for _, text in sorted(topics.items())]
    random.Random(0).shuffle(manual)  # noqa: S311 - no secret, and the same everywhere
    tokens: list[int] = []
    for passage in (*PASSAGES, *manual):
        if len(tokens) < count:
            tokens += encode(f"{passage}\n\n")
    return tokens[:count]
