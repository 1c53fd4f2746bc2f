"""The contract of an engine core: it turns numbered sequences into tokens.

`BatchedCore` (batched_core.py) schedules many sequences over compiled graphs and samples from their logits.
`SequentialCore` (sequential_core.py) runs one sequence after another on a device that samples by itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from llmc.errors import InputError
from llmc.runtime.engine.observer import EngineStats, FinishReason, StepRecord
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.engine.sampling.sampler import SequenceSampler

if TYPE_CHECKING:
    from llmc.buckets.plan import Plan
    from llmc.errors import LlmcError
    from llmc.runtime.engine.kv_transfer import KVTransfer, Prefiller
    from llmc.runtime.engine.sampling.batch import TokenLogprobs
    from llmc.runtime.engine.sampling.constraints import GrammarConstraint
    from llmc.runtime.executors.base import Executor


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """Token `token_id` of a sequence. `finish_reason` is set on the last one; `ends` marks an end or stop token.

    `token_id` is None for a sequence that ends without a token, because it failed ("error") or its device ended it
    ("stop"). `error` is the device's error if other sequences continue.
    """

    sequence: int
    token_id: int | None
    finish_reason: FinishReason | None = None
    logprobs: TokenLogprobs | None = None
    ends: bool = False
    error: LlmcError | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The results of one step. A sequence has several tokens, in order, if drafts were accepted.

    `admitted`: sequences that got a slot, with the prompt tokens that a cached prefix saved. `handed`: KV transfer
    costs of sequences whose prompt another executor computed.
    """

    record: StepRecord
    tokens: list[TokenEvent]
    admitted: tuple[tuple[int, int], ...] = ()
    handed: Mapping[int, KVTransfer] = field(default_factory=dict)


class EngineCore(ABC):
    """Turns numbered sequences into tokens. Not thread-safe, except `check`, `require_offered` and `sampler`.

    `steps` counts the steps that ran. `room` is how many tokens of one sequence the cache holds.
    """

    def __init__(self, plan: Plan, executor: Executor, vocab_size: int, room: int) -> None:
        self.plan = plan
        self.executor = executor
        self.vocab_size = vocab_size
        self.steps = 0
        self._room = room

    def check(self, prompt: Sequence[int]) -> None:
        """Raise InputError, naming the limit, if no bucket or no cache accepts a prompt of these ids."""
        length, limits = len(prompt), self.plan.limits
        if not length:
            raise InputError("the prompt is empty: it has no token")
        if length > limits.longest_prompt:
            raise InputError(
                f"the prompt has {length} tokens; this bundle takes at most {limits.longest_prompt} "
                + (
                    f"(max_prompt_len {limits.max_prompt_len})"
                    if limits.max_prompt_len is not None
                    else f"(max_model_len {limits.max_model_len}, one token left to generate)"
                )
            )
        if length > self._room:
            raise InputError(
                f"the prompt has {length} tokens; the KV cache holds {self._room}: raise the KV cache space, or "
                "send a shorter prompt"
            )
        smallest, largest = min(prompt), max(prompt)
        if smallest < 0 or largest >= self.vocab_size:
            found = smallest if smallest < 0 else largest
            raise InputError(f"prompt token ids must be in 0 … {self.vocab_size - 1}, found {found}")

    def offers(self, parameter: str) -> bool:
        """Whether requests may set the sampling parameter of this name. An engine that samples offers all."""
        del parameter
        return True

    def require_offered(self, params: SamplingParams) -> None:  # noqa: B027 - all are
        """Raise InputError, beginning with the parameter's name, if `params` uses one that is not offered."""

    def sampler(
        self, prompt: Sequence[int], params: SamplingParams, end_ids: Sequence[int] = (),
        constraint: GrammarConstraint | None = None, bad_words: Sequence[Sequence[int]] = (),
    ) -> SequenceSampler:  # fmt: skip
        """Create the sampler that `add` takes; raises InputError for ids in `params` outside the vocabulary."""
        ends = () if params.ignore_eos else end_ids
        most = self.executor.capabilities.most_top_k
        if most is not None and not params.greedy and not 0 < params.top_k <= most:
            params = replace(params, top_k=most)
        return SequenceSampler(params, self.vocab_size, prompt, ends, constraint, bad_words=bad_words)

    @property
    @abstractmethod
    def max_num_seqs(self) -> int:
        """The largest number of sequences that run at once."""

    @abstractmethod
    def add(
        self, sequence: int, prompt: Sequence[int], sampler: SequenceSampler, *, priority: int = 0,
        group: int | None = None, adapter: int = 0,
    ) -> None:  # fmt: skip
        """Queue a sequence under a new number. Its prompt must have passed `check`.

        `adapter` is the number of the bundle's adapter, 0 for none. The sequence generates as many tokens as params,
        max_model_len and the whole cache allow.
        """

    @abstractmethod
    def cancel(self, sequence: int) -> None:
        """Cancel a sequence, for example at a stop string. Its slot is free before the next step."""

    @abstractmethod
    def forget_slots(self) -> None:
        """Forget cached tokens, because something else ran in the slots. Raises RuntimeError while there is work."""

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""

    @property
    def waits(self) -> bool:
        """Whether nothing can run until the prefill side has results."""
        return False

    @property
    def prefiller(self) -> Prefiller | None:
        """The component that computes prompts on another executor; None if they run here."""
        return None

    @property
    @abstractmethod
    def stats(self) -> EngineStats:
        """Current gauges, counted in sequences."""

    @abstractmethod
    def step(self) -> StepOutput | None:
        """Run one step; None if there is nothing to do.

        A sequence that fails by itself ends with the reason "error"; others continue. Raises the executor's errors.
        Then every sequence is forgotten, and the engine can be used again.
        """

    def complete(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], adapters: Sequence[int] = ()
    ) -> list[list[int]]:  # fmt: skip
        """Run prompts to their ends, together with whatever else runs, and return each one's tokens.

        `adapters` has one adapter for each prompt. Raises the device's errors.
        """
        built: dict[int, list[int]] = {-1 - i: [] for i in range(len(prompts))}
        left = set(built)
        chosen = adapters or [0] * len(prompts)
        for sequence, prompt, one, adapter in zip(built, prompts, params, chosen, strict=True):
            self.check(prompt)
            self.add(sequence, prompt, self.sampler(prompt, one), adapter=adapter)
        while left:
            outcome = self.step()
            for token in outcome.tokens if outcome else ():
                if token.sequence in built and token.token_id is not None:
                    built[token.sequence].append(token.token_id)
                if token.error is not None:
                    raise token.error
                if token.finish_reason is not None:
                    left.discard(token.sequence)
        return list(built.values())

    def _budget(self, prompt: Sequence[int], params: SamplingParams) -> int:
        """The largest number of tokens that a sequence may generate."""
        # the last token of a sequence is never put into the cache
        room = min(self.plan.limits.max_model_len, self._room + 1) - len(prompt)
        return room if params.max_tokens is None else min(room, params.max_tokens)
