"""The contract of an engine core: sequences by number, from prompts to tokens, whoever chooses the tokens.

`BatchedCore` (batched_core.py) schedules many sequences over compiled graphs, and samples from their logits.
`SequentialCore` (sequential_core.py) runs one sequence after the other on a device that samples by itself.
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
    """Token `token_id` of a sequence; `finish_reason` is set on its last one. `ends`: it is an end or stop token.

    A sequence may end without a token, with None: it failed ("error"), or its device ended it ("stop"). `error` is what
    its device failed with, where others go on.
    """

    sequence: int
    token_id: int | None
    finish_reason: FinishReason | None = None
    logprobs: TokenLogprobs | None = None
    ends: bool = False
    error: LlmcError | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step gave: several tokens of a sequence, in their order, where drafts held.

    `admitted`: sequences that got their slot for it, with the prompt tokens a prefix saved. `handed`: of those whose
    prompt another executor computed, what that cost.
    """

    record: StepRecord
    tokens: list[TokenEvent]
    admitted: tuple[tuple[int, int], ...] = ()
    handed: Mapping[int, KVTransfer] = field(default_factory=dict)


class EngineCore(ABC):
    """Sequences, by number, from prompts to tokens. Not thread-safe, except `check`, `require_offered` and `sampler`.

    `steps` counts those that ran. `room` is how many tokens of one sequence the cache holds.
    """

    def __init__(self, plan: Plan, executor: Executor, vocab_size: int, room: int) -> None:
        self.plan = plan
        self.executor = executor
        self.vocab_size = vocab_size
        self.steps = 0
        self._room = room

    def check(self, prompt: Sequence[int]) -> None:
        """Raise InputError when no bucket, or no cache, takes a prompt of these ids, naming the limit."""
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
        """Whether requests may ask for a sampling parameter, by its name; an engine that samples offers all."""
        del parameter
        return True

    def require_offered(self, params: SamplingParams) -> None:  # noqa: B027 - all are
        """Raise InputError, which begins with the parameter's name, for one that this engine does not offer."""

    def sampler(
        self, prompt: Sequence[int], params: SamplingParams, end_ids: Sequence[int] = (),
        constraint: GrammarConstraint | None = None, bad_words: Sequence[Sequence[int]] = (),
    ) -> SequenceSampler:  # fmt: skip
        """The state that `add` takes; raises InputError for ids in `params` that the vocabulary lacks."""
        ends = () if params.ignore_eos else end_ids
        most = self.executor.capabilities.most_top_k
        if most is not None and not params.greedy and not 0 < params.top_k <= most:
            params = replace(params, top_k=most)
        return SequenceSampler(params, self.vocab_size, prompt, ends, constraint, bad_words=bad_words)

    @property
    @abstractmethod
    def max_num_seqs(self) -> int:
        """Sequences that run at once."""

    @abstractmethod
    def add(
        self, sequence: int, prompt: Sequence[int], sampler: SequenceSampler, *, priority: int = 0,
        group: int | None = None, adapter: int = 0,
    ) -> None:  # fmt: skip
        """Queue a sequence under a new number, whose prompt `check` has passed.

        `adapter`: which of the bundle's adapters it is computed with, 0 for none. It makes as many tokens as params
        allow, max_model_len, and the whole cache if it had it alone.
        """

    @abstractmethod
    def cancel(self, sequence: int) -> None:
        """End a sequence, e.g. at a stop string: its slot is free before the next step."""

    @abstractmethod
    def forget_slots(self) -> None:
        """Use nothing of what slots hold: something else ran in them. Raises RuntimeError while there is work."""

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """Whether some sequence is not finished."""

    @property
    def waits(self) -> bool:
        """Whether nothing can run before the prefill side has news."""
        return False

    @property
    def prefiller(self) -> Prefiller | None:
        """What computes prompts on another executor; None: they run here."""
        return None

    @property
    @abstractmethod
    def stats(self) -> EngineStats:
        """Gauges of now, in sequences."""

    @abstractmethod
    def step(self) -> StepOutput | None:
        """Run one step; None when there is nothing to do.

        A sequence that fails by itself ends with the reason "error"; other sequences continue. Raises the executor's
        errors; then every sequence is forgotten, and the engine can be used again.
        """

    def complete(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], adapters: Sequence[int] = ()
    ) -> list[list[int]]:  # fmt: skip
        """Run prompts to their ends beside whatever else runs, each with its adapter; the tokens of each. Raises what a
        device fails with."""
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
        """The tokens that a sequence may make."""
        # the last token of a sequence is never put into the cache
        room = min(self.plan.limits.max_model_len, self._room + 1) - len(prompt)
        return room if params.max_tokens is None else min(room, params.max_tokens)
