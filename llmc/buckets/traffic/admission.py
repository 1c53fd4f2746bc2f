"""Admission of a trace's requests under a server's limits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from llmc.buckets.limits import Limits
from llmc.buckets.traffic.events import TrafficRequest
from llmc.errors import InputError


class Admission:
    """Passes on the requests that `limits` allow, and drops the others or, with `clip`, cuts them to size.

    After clipping, a prompt has `limits.longest_prompt` tokens, its output the rest of max_model_len (at least 1), and
    at most all but one of the prompt's tokens are cached.

    admitted      requests passed on, including clipped ones
    above_prompt  requests whose prompt is above `limits.longest_prompt`
    above_total   other requests whose prompt and output are above `limits.max_model_len`
    clipped       those of the last two that were clipped and passed on; 0 without `clip`

    The counts are of the latest call, and complete when its iterator is exhausted.
    """

    def __init__(self, limits: Limits, *, clip: bool = False) -> None:
        self._limits = limits
        self._clip = clip
        self.admitted = 0
        self.above_prompt = 0
        self.above_total = 0
        self.clipped = 0

    def __call__(self, requests: Iterable[TrafficRequest]) -> Iterator[TrafficRequest]:
        """Yield the admitted requests, in order. Raises InputError at the end if there were requests but none fits."""
        self.admitted = self.above_prompt = self.above_total = self.clipped = 0
        longest_prompt, longest_total = self._limits.longest_prompt, self._limits.max_model_len
        for request in requests:
            time, prompt, output, cached = request
            if prompt > longest_prompt:
                self.above_prompt += 1
            elif prompt + output > longest_total:
                self.above_total += 1
            else:
                self.admitted += 1
                yield request
                continue
            if self._clip:
                prompt = min(prompt, longest_prompt)
                self.clipped += 1
                self.admitted += 1
                yield TrafficRequest(time, prompt, min(output, longest_total - prompt), min(cached, prompt - 1))
        if self.left_out and not self.admitted:
            raise InputError(
                f"none of the {self.left_out} requests of the trace fits: {self.note()}; raise max_model_len or "
                "max_prompt_len, or have the requests clipped"
            )

    @property
    def left_out(self) -> int:
        """Number of dropped requests."""
        return self.above_prompt + self.above_total - self.clipped

    def note(self) -> str:
        """Return the counts as text for a report."""
        limits = self._limits
        prompt_limit = "max_model_len - 1" if limits.max_prompt_len is None else "max_prompt_len"
        reasons = [
            f"{count} with {what}"
            for count, what in (
                (self.above_prompt, f"a prompt above {limits.longest_prompt} tokens ({prompt_limit})"),
                (self.above_total, f"prompt and output above {limits.max_model_len} tokens (max_model_len)"),
            )
            if count
        ]
        note = f"{self.admitted} of {self.admitted + self.left_out} requests admitted"
        if not reasons:
            return note
        return f"{note}, {'clipped' if self._clip else 'left out'}: {', '.join(reasons)}"
