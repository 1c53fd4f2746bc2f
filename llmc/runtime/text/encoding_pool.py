"""Child processes that tokenize, and errors for the texts or tokenizers that exceed their limits."""

from __future__ import annotations

from llmc.errors import InputError
from llmc.runtime.confined.limits import ChildLimits
from llmc.runtime.confined.pool import ChildPool, JobError, LimitError

LIMITS = ChildLimits(seconds=30.0, memory_bytes=1536 << 20)
"""For the texts of one request. 4 MB take 2 to 9 s and 0.4 to 1.3 GB."""


def encoding_pool(tokenizer_json: bytes, limits: ChildLimits | None = None) -> ChildPool:
    """A pool of children that tokenize {"texts", "how"}; `limits` is LIMITS by default."""
    return ChildPool(
        "llmc.runtime.text.confined_encoding:open_encoder",
        {"tokenizer_json": tokenizer_json.decode()},
        limits or LIMITS,
    )


def not_encoded(error: LimitError | JobError) -> InputError:
    """The error for a text that exceeded the limits or that the tokenizer's native code failed on."""
    if isinstance(error, LimitError):
        return InputError(f"the text cannot be tokenised: {error}; send a shorter one")
    return InputError(f"the text cannot be tokenised: the model's tokenizer fails on it ({error})")
