"""Limits of the requests that a server accepts and a plan must cover."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llmc.errors import InputError

if TYPE_CHECKING:
    from llmc.buckets.bucket import Bucket

DEFAULT_MAX_NUM_SEQS = 8
DEFAULT_BLOCK_SIZE = 128


@dataclass(frozen=True, init=False)
class Limits:
    """Serving limits, with the names that vLLM uses.

    max_model_len             tokens of one sequence, prompt and answer together; at least 2
    max_num_seqs              sequences in flight, and so in one decode step
    max_num_batched_tokens    padded new tokens of one prefill; default max_num_seqs · max_model_len, which excludes
                              nothing. At least max_num_seqs, since a decode step has a token for each
    block_size                tokens of one KV cache block, the unit of default ranges; default 128, or max_model_len
                              where that is smaller
    max_prompt_len            longest accepted prompt; None: max_model_len − 1, room for one answer token
    contexts                  whether graphs read cached tokens. False for a model with only recurrent state: all its
                              buckets have context 0, which covers any number of tokens before a step (`reading`)

    Raises InputError, naming the limit, for a value that is not an integer or is out of range.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    max_prompt_len: int | None
    contexts: bool

    def __init__(
        self,
        max_model_len: int,
        max_num_seqs: int = DEFAULT_MAX_NUM_SEQS,
        max_num_batched_tokens: int | None = None,
        block_size: int | None = None,
        max_prompt_len: int | None = None,
        contexts: int = True,
    ) -> None:
        _require("max_model_len", max_model_len, 2)
        _require("max_num_seqs", max_num_seqs, 1)
        if max_num_batched_tokens is None:
            max_num_batched_tokens = max_num_seqs * max_model_len
        _require("max_num_batched_tokens", max_num_batched_tokens, 1)
        if max_num_batched_tokens < max_num_seqs:
            raise InputError(
                f"max_num_batched_tokens {max_num_batched_tokens} is below max_num_seqs {max_num_seqs}: "
                "a decode step computes one token for each sequence; raise the first or lower the second"
            )
        if block_size is None:
            block_size = min(DEFAULT_BLOCK_SIZE, max_model_len)
        _require("block_size", block_size, 1, max_model_len, "max_model_len")
        if max_prompt_len is not None:
            _require("max_prompt_len", max_prompt_len, 1, max_model_len - 1, "max_model_len - 1")
        object.__setattr__(self, "max_model_len", max_model_len)
        object.__setattr__(self, "max_num_seqs", max_num_seqs)
        object.__setattr__(self, "max_num_batched_tokens", max_num_batched_tokens)
        object.__setattr__(self, "block_size", block_size)
        object.__setattr__(self, "max_prompt_len", max_prompt_len)
        object.__setattr__(self, "contexts", bool(contexts))

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt that a server under these limits accepts."""
        return self.max_model_len - 1 if self.max_prompt_len is None else self.max_prompt_len

    @property
    def longest_past(self) -> int:
        """Most tokens that can be in the cache when a decode step starts: all except the one it computes."""
        return self.max_model_len - 1

    def read(self, cached: int) -> int:
        """Return how many of `cached` tokens a step reads, which its bucket's context must cover."""
        return cached if self.contexts else 0

    def reach(self, bucket: Bucket) -> int:
        """Return the tokens of the longest prompt that runs through a prompt bucket, in chunks if needed."""
        return bucket.context + bucket.query if self.contexts else self.max_model_len

    def padded(self, bucket: Bucket) -> int:
        """Return a step's tokens in the unit of padding: cached ones of a decode step that reads them, otherwise new
        ones.
        """
        return bucket.batch * bucket.context if bucket.phase == "decode" and self.contexts else bucket.tokens

    def reading(self, contexts: bool) -> Limits:
        """Return these limits for a model whose graphs read cached tokens, or read none."""
        return replace(self, contexts=contexts)

    def exceeded(self, bucket: Bucket) -> tuple[str, int, str, int] | None:
        """Return the first limit that `bucket` is above, as (what, its value, limit's name, limit); None within all."""
        if bucket.batch > self.max_num_seqs:
            return "batch", bucket.batch, "max_num_seqs", self.max_num_seqs
        if bucket.query > self.max_model_len:
            return "query", bucket.query, "max_model_len", self.max_model_len
        if not self.contexts and bucket.context:
            return "context", bucket.context, "that of a model with only recurrent state,", 0
        if bucket.context > self.max_model_len:
            return "context", bucket.context, "max_model_len", self.max_model_len
        if bucket.phase == "prompt" and bucket.tokens > self.max_num_batched_tokens:
            return "batch*query", bucket.tokens, "max_num_batched_tokens", self.max_num_batched_tokens
        return None

    def exceeded_by(self, bucket: Bucket) -> str | None:
        """Return `exceeded` as text ("batch 7 is above max_num_seqs 6")."""
        found = self.exceeded(bucket)
        return f"{found[0]} {found[1]} is above {found[2]} {found[3]}" if found else None

    def to_dict(self) -> dict[str, int]:
        """Return the limits as a JSON object; max_prompt_len only where it is set, contexts only where it is false."""
        fields = {
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "block_size": self.block_size,
        }
        if self.max_prompt_len is not None:
            fields["max_prompt_len"] = self.max_prompt_len
        if not self.contexts:
            fields["contexts"] = False
        return fields


def _require(name: str, value: object, least: int, most: int | None = None, most_name: str = "") -> None:
    if type(value) is not int:
        raise InputError(f"{name} {value!r} is not an integer")
    if value < least:
        raise InputError(f"{name} {value} must be at least {least}")
    if most is not None and value > most:
        raise InputError(f"{name} {value} must be at most {most_name} ({most})")
