"""Prompts computed by one executor and decoded by another, in one process: every pair of kinds of the fake device,
every token checked against the toy model's reference."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.compiler.verification.toy_reference import ToyReference
from llmc.errors import ArtifactError, DeviceError
from llmc.runtime.async_llm import BundleAsyncLLM
from llmc.runtime.bundle import Bundle
from llmc.runtime.disaggregated.worker import PrefillWorker
from llmc.runtime.engine.batched_core import BatchedCore
from llmc.runtime.engine.kv_transfer import Prefilled, PrefillFailed
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.executors import open_executor
from llmc.runtime.executors.base import Executor
from llmc.runtime.llm import BundleLLM
from llmc.testing.toy import VOCAB
from tests.tiers import default_cases, examples
from tests.timing import PATIENCE_S
from tests.toy import Toy

PROPERTY = examples(30, database=None, derandomize=True)
SEQS, LENGTH = 4, 32
KINDS = ("static", "exact", "ragged", "paged")


def greedy(max_tokens: int = 4, **params: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **{"temperature": 0, **params})


def worker_of(toy: Toy, **how: Any) -> PrefillWorker:
    bundle = Bundle.open(toy.bundle)
    return PrefillWorker(bundle, lambda: open_executor(bundle, SEQS + 1), min_prefix=2, **how)


class Disaggregated:
    """An engine with a prefill side, on two executors; slots keep what earlier tests left."""

    def __init__(self, prefill: Toy, decode: Toy) -> None:
        self.worker = worker_of(prefill)
        bundle = Bundle.open(decode.bundle)
        self.executor = open_executor(bundle, SEQS + 2)
        self.client = self.worker.client()
        self.engine = BatchedCore(bundle.plan, self.executor, VOCAB, min_prefix=2, prefiller=self.client)
        self._numbers = 0

    def run(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], cancel: dict[int, int] | None = None
    ) -> list[list[int]]:
        """The tokens of each prompt; `cancel` says of some after how many tokens they are cancelled."""
        first = self._numbers
        self._numbers += len(prompts)
        built: dict[int, list[int]] = {first + i: [] for i in range(len(prompts))}
        stops = {first + index: count for index, count in (cancel or {}).items()}
        for number, prompt, one in zip(built, prompts, params, strict=True):
            self.engine.add(number, prompt, self.engine.sampler(prompt, one))
            if stops.get(number) == 0:
                self.engine.cancel(number)
        while self.engine.has_work:
            outcome = self.engine.step()
            assert outcome is not None
            if outcome.record.handed:
                assert set(outcome.handed) == set(outcome.record.requests)
            for token in outcome.tokens:
                assert token.token_id is not None
                built[token.sequence].append(token.token_id)
                if stops.get(token.sequence) == len(built[token.sequence]):
                    self.engine.cancel(token.sequence)
        return list(built.values())

    def close(self) -> None:
        self.worker.close()
        self.executor.close()


@pytest.fixture(scope="module", params=[(p, d) for p in KINDS for d in KINDS], ids="-".join)
def pair(toys: dict[str, Toy], request: pytest.FixtureRequest) -> Iterator[Disaggregated]:
    prefill, decode = request.param
    built = Disaggregated(toys[prefill], toys[decode])
    yield built
    built.close()


tokens = st.integers(0, VOCAB - 2)
prompts = st.lists(st.lists(tokens, min_size=1, max_size=LENGTH - 5), min_size=1, max_size=7)


@default_cases(6)
@given(
    requested=prompts, shared=st.lists(tokens, max_size=8),
    cancel=st.dictionaries(st.integers(0, 6), st.integers(0, 3)),
    longest=st.sampled_from([LENGTH - 1, 12]),
)  # fmt: skip
@PROPERTY
def test_tokens_are_those_of_one_device(
    pair: Disaggregated, trusted: ToyReference, requested: list[list[int]], shared: list[int], cancel: dict[int, int],
    longest: int,
) -> None:  # fmt: skip
    """Ragged batches, prompts in chunks, with beginnings in common, some cancelled in the queue or while they run,
    some computed where they are decoded."""
    pair.worker.longest_prompt = longest
    requested = [(shared + one)[: LENGTH - 5] for one in requested]
    stops = {index: count for index, count in cancel.items() if index < len(requested)}
    built = pair.run(requested, [greedy()] * len(requested), stops)
    for index, (prompt, found) in enumerate(zip(requested, built, strict=True)):
        assert found == trusted.greedy(prompt, 4)[: stops.get(index, 4)]
    assert pair.engine.scheduler.occupancy.live_tokens == 0
    assert not pair.client.has_news


def test_every_choice_of_a_request_comes_from_one_computed_prompt(toys: dict[str, Toy], trusted: ToyReference) -> None:
    prompt = [5, 6, 7, 8, 9]
    with BundleLLM(toys["static"].bundle, keep_steps=True, prefill=toys["ragged"].bundle) as llm:
        [output] = llm.generate([{"prompt_token_ids": prompt}], greedy(4, n=3, temperature=1, top_k=1))
        assert [step.live_rows for step in llm.records if step.handed] == [3]
    assert [o.token_ids for o in output.outputs] == [trusted.greedy(prompt, 4)] * 3
    cost = output.timings.kv_transfer
    assert cost is not None and cost.tokens == len(prompt) and cost.bytes == 4 * (5 * 8 + VOCAB)
    assert min(cost.queue_s, cost.prefill_s, cost.export_s, cost.wait_s, cost.import_s) >= 0 < cost.gb_per_s


@pytest.mark.parametrize("seed", [1, 2])
def test_sampling_is_as_without_a_prefill_side(toys: dict[str, Toy], seed: int) -> None:
    """Seeds, penalties, log probabilities, logit bias, stop ids and texts: all read the handed-over logits."""
    params = [
        SamplingParams(max_tokens=6, temperature=1.3, seed=seed, top_p=0.9, logprobs=3),
        SamplingParams(max_tokens=6, temperature=0.7, seed=seed, repetition_penalty=1.4, presence_penalty=0.3, n=2),
        SamplingParams(max_tokens=6, temperature=0, logit_bias={7: 2.0}, min_tokens=2, logprobs=0),
        SamplingParams(max_tokens=6, temperature=0, stop=["a"], bad_words=["b"]),
    ]
    given = [{"prompt_token_ids": [seed, 3, 9, index]} for index in range(len(params))]
    found = []
    for prefill in (None, toys["exact"].bundle):
        with BundleLLM(toys["static"].bundle, prefill=prefill) as llm:
            found.append([output.outputs for output in llm.generate(given, params)])
    for alone, handed in zip(*found, strict=True):
        for one, other in zip(alone, handed, strict=True):
            assert (one.text, one.token_ids, one.finish_reason) == (other.text, other.token_ids, other.finish_reason)
            if one.logprobs is not None:
                for mine, theirs in zip(one.logprobs, other.logprobs or (), strict=True):
                    assert [(k, round(v.logprob, 4)) for k, v in mine.items()] == [
                        (k, round(v.logprob, 4)) for k, v in theirs.items()
                    ]


def test_a_server_engine_waits_for_the_prefill_side_and_goes_on_decoding_meanwhile(
    toys: dict[str, Toy], trusted: ToyReference
) -> None:
    given = [[i, i + 1, 7] * (1 + i % 4) for i in range(20)]

    async def test() -> None:
        async with BundleAsyncLLM(toys["static"].bundle, prefill=toys["ragged"].bundle) as llm:

            async def tokens_of(index: int) -> list[int]:
                found: list[int] = []
                request = {"prompt_token_ids": given[index]}
                async for output in llm.generate(request, greedy(2 + index % 5), str(index)):
                    found = output.outputs[0].token_ids
                    if index % 7 == 3:
                        break
                return found

            built = await asyncio.gather(*map(tokens_of, range(len(given))))
            for index, found in enumerate(built):
                whole = trusted.greedy(given[index], 2 + index % 5)
                assert found == (whole[: len(found)] if index % 7 == 3 else whole)

    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))


def test_prefixes_are_reused_on_the_prefill_side(toys: dict[str, Toy]) -> None:
    long = list(range(1, 21))
    with BundleLLM(toys["static"].bundle, prefill=toys["ragged"].bundle) as llm:
        llm.generate([{"prompt_token_ids": long}], greedy())
        [again] = llm.generate([{"prompt_token_ids": [*long, 30]}], greedy())
    assert again.num_cached_tokens == 20


class Client:
    """Takes what comes, waiting for it."""

    def __init__(self, worker: PrefillWorker, bound: int) -> None:
        self.prompts = worker.client(bound)

    def take(self, most: int = 1) -> list[Prefilled | PrefillFailed]:
        assert self.prompts.wait(PATIENCE_S)
        return self.prompts.take(most)


def test_a_client_that_takes_nothing_has_no_more_than_its_bound_computed_and_holds_up_nobody(
    toys: dict[str, Toy],
) -> None:
    worker = worker_of(toys["static"])
    slow, quick = Client(worker, 2), Client(worker, 2)
    for number in range(8):
        slow.prompts.submit(number, [1, 2, number])
    for number in range(20):
        quick.prompts.submit(number, [3, 4, number])
        [one] = quick.take()
        assert isinstance(one, Prefilled) and one.number == number
    held = slow.prompts.take(8)
    assert len(held) == 2
    numbers = [one.number for one in held]
    while len(numbers) < 8:
        numbers += [one.number for one in slow.take(8)]
    assert numbers == list(range(8))
    worker.close()


def test_cancelled_prompts_never_come_and_leave_their_place(toys: dict[str, Toy]) -> None:
    worker = worker_of(toys["static"])
    client = Client(worker, 1)
    for number in range(4):
        client.prompts.submit(number, [1, 2, number])
    assert client.prompts.wait(PATIENCE_S)
    for number in (0, 1, 2):
        client.prompts.cancel(number)
    [last] = client.take()
    assert last.number == 3
    worker.close()


def test_prompts_of_a_lower_priority_go_first(toys: dict[str, Toy]) -> None:
    worker = worker_of(toys["static"])
    client = Client(worker, 1)
    client.prompts.submit(0, [1])
    assert client.prompts.wait(PATIENCE_S)
    client.prompts.submit(1, [2])
    client.prompts.submit(2, [3], priority=-1)
    assert [client.take()[0].number for _ in range(3)] == [0, 2, 1]
    worker.close()


class Failing:
    """An executor whose `fails` next steps raise."""

    def __init__(self, executor: Executor, fails: int) -> None:
        self._executor = executor
        self.fails = fails
        self.error: BaseException = DeviceError("the device is gone")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def run(self, step: Any) -> Any:
        if self.fails:
            self.fails -= 1
            raise self.error
        return self._executor.run(step)


def failing_disaggregated(toy: Toy, fails: int) -> tuple[BatchedCore, PrefillWorker, Failing]:
    bundle, other = Bundle.open(toy.bundle), Bundle.open(toy.bundle)
    failing = Failing(open_executor(bundle, SEQS), fails)
    worker = PrefillWorker(bundle, lambda: failing)  # type: ignore[arg-type, return-value]
    return BatchedCore(other.plan, open_executor(other, SEQS), VOCAB, prefiller=worker.client()), worker, failing


@pytest.mark.parametrize("fails", [1, 2, 5])
def test_a_step_that_fails_is_tried_again_and_then_run_where_it_is_decoded(
    toys: dict[str, Toy], trusted: ToyReference, fails: int
) -> None:
    engine, worker, _ = failing_disaggregated(toys["static"], fails)
    given = [[1, 2, 3], [4, 5]]
    assert engine.complete(given, [greedy()] * 2) == [trusted.greedy(one, 4) for one in given]
    worker.close()


def test_a_prefill_side_that_ends_leaves_an_engine_that_computes_alone(
    toys: dict[str, Toy], trusted: ToyReference
) -> None:
    engine, worker, failing = failing_disaggregated(toys["static"], 1)
    failing.error = SystemExit("killed")
    for prompt in ([1, 2, 3], [4, 5, 6]):
        assert engine.complete([prompt], [greedy()]) == [trusted.greedy(prompt, 4)]
    assert worker.ended is not None and "killed" in worker.ended
    worker.close()


def test_logits_that_are_no_numbers_fail_their_request_alone(toys: dict[str, Toy], trusted: ToyReference) -> None:
    engine, worker, failing = failing_disaggregated(toys["static"], 0)
    run = failing._executor.run

    def damaged(step: Any) -> Any:
        logits = run(step).copy()
        logits[[5 in row for row in step.token_ids]] = np.nan
        return logits

    failing.run = damaged  # type: ignore[method-assign]
    given = [[1, 2, 3], [4, 5]]
    assert engine.complete(given, [greedy()] * 2) == [trusted.greedy(given[0], 4), []]
    worker.close()


def test_a_prompt_that_the_prefill_side_does_not_take_runs_where_it_is_decoded(
    toys: dict[str, Toy], trusted: ToyReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = Disaggregated(toys["ragged"], toys["static"])
    monkeypatch.setattr(built.worker, "longest_prompt", 4)
    given = [[1, 2, 3], list(range(1, 10))]
    assert built.run(given, [greedy()] * 2) == [trusted.greedy(one, 4) for one in given]
    built.close()


def test_bundles_of_two_models_are_refused_with_what_differs(toys: dict[str, Toy], tmp_path: Any) -> None:
    other = Toy.make(tmp_path, seed=7)
    other.compile()
    before = threading.active_count()
    with pytest.raises(ArtifactError, match=r"their checkpoints differ \(in model.safetensors\)"):
        BundleLLM(toys["static"].bundle, prefill=other.bundle)
    assert threading.active_count() == before
