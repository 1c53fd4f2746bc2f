"""The outcome of one request."""

from __future__ import annotations

from dataclasses import dataclass, field

REFUSALS = ("http 429", "http 503")
"""Kinds of failure that ask the client to come again later."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request got no whole answer. `kind` is one of

    http STATUS       an answer with another status than 200
    no connection     refused, unreachable, or broken before an answer began
    timeout           not whole in the time that was given
    truncated         the answer broke off
    error event       the server said in mid-stream that it failed
    not a stream      the answer is none of server-sent events
    finished by R     the server ended it by a reason R that is none of a whole answer's

    `retry_after_s` is what a refusal's Retry-After says.
    """

    kind: str
    message: str
    retry_after_s: float | None = None

    @property
    def refused(self) -> bool:
        """Whether the server said to come again later."""
        return self.kind in REFUSALS


@dataclass(slots=True)
class Outcome:
    """One request and its answer; times in seconds since the run began.

    `due_s` when it was to be sent, `sent_s` when it was, `connected_s` when its connection stood, `text_s` when each
    piece of text came, `ended_s` when the answer was whole or failed. `asked_prompt` and `asked_output` are tokens as
    the workload wants them; `prompt_tokens` and `output_tokens` as the server counted them, None where it did not.
    """

    index: int
    due_s: float
    asked_prompt: int
    asked_output: int
    sent_s: float = 0.0
    connected_s: float | None = None
    ended_s: float = 0.0
    text_s: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    finish_reason: str | None = None
    failure: Failure | None = None

    @property
    def ok(self) -> bool:
        """Whether the answer came whole."""
        return self.failure is None

    @property
    def tokens(self) -> int:
        """Tokens generated: as the server counted them, else the pieces of text."""
        return len(self.text_s) if self.output_tokens is None else self.output_tokens

    @property
    def ttft_s(self) -> float | None:
        """Seconds from when it was due to its first text; None without text."""
        return self.text_s[0] - self.due_s if self.text_s else None

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between a piece of text and the one before."""
        return [b - a for a, b in zip(self.text_s, self.text_s[1:], strict=False)]

    @property
    def tpot_s(self) -> float | None:
        """Seconds a token after the first, (last text − first text) / (tokens − 1); None below two tokens."""
        return (self.text_s[-1] - self.text_s[0]) / (self.tokens - 1) if self.text_s and self.tokens > 1 else None

    @property
    def e2e_s(self) -> float:
        """Seconds from when it was due to the answer's end."""
        return self.ended_s - self.due_s
