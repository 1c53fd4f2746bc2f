"""The unit of compilation: one graph shape of one phase."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from llmc.errors import InputError

Phase = Literal["prompt", "decode"]
"""`prompt` (prefill) computes many new tokens a sequence, `decode` exactly one."""

PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclass(frozen=True, order=True)
class Bucket:
    """A graph shape: `batch` sequences, each with `query` new tokens that attend to `context` cached tokens.

    `query` and `context` are in tokens per sequence; a decode bucket has query 1. A request fits a bucket when none of
    its numbers is larger, and is padded to it. Raises InputError on any other value.
    """

    phase: Phase
    batch: int
    query: int
    context: int

    def __post_init__(self) -> None:
        if self.phase not in PHASES:
            raise InputError(f"bucket phase {self.phase!r} is not one of {', '.join(PHASES)}")
        for name, least in (("batch", 1), ("query", 1), ("context", 0)):
            value = getattr(self, name)
            if type(value) is not int:
                raise InputError(f"{self.phase} bucket: {name} {value!r} is not an integer")
            if value < least:
                raise InputError(f"{self.phase} bucket: {name} {value} must be at least {least}")
        if self.phase == "decode" and self.query != 1:
            raise InputError(f"decode bucket: query {self.query} must be 1, one new token per sequence")

    def covers(self, batch: int, query: int, context: int) -> bool:
        """Whether `batch` sequences of `query` new and `context` cached tokens fit after padding."""
        return self.batch >= batch and self.query >= query and self.context >= context

    @property
    def shape(self) -> tuple[int, int, int]:
        """(batch, query, context)."""
        return self.batch, self.query, self.context

    @property
    def tokens(self) -> int:
        """New tokens that one run computes, including padding."""
        return self.batch * self.query

    def __str__(self) -> str:
        return f"{self.phase}[{self.batch}x{self.query}+{self.context}]"
