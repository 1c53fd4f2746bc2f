"""The engine over executors that take ragged steps: prompts beside decode, and slots that share a pool of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from llmc.compiler.verification.toy_reference import ToyReference
from llmc.errors import InputError
from llmc.runtime.bundle import Bundle
from llmc.runtime.engine.batched_core import RAGGED_PREFILL_BUDGET, BatchedCore
from llmc.runtime.engine.observer import StepRecord
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.executors import open_executor
from llmc.runtime.llm import BundleLLM
from llmc.runtime.step import exact, ragged
from llmc.testing.toy import VOCAB
from tests.toy import Toy


def greedy(max_tokens: int | None = 4, **params: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, **params)


def engine_of(toy: Toy, slots: int = 6, **options: Any) -> BatchedCore:
    bundle = Bundle.open(toy.bundle)
    return BatchedCore(bundle.plan, open_executor(bundle, slots), VOCAB, **options)


def play(engine: BatchedCore) -> tuple[dict[int, list[int]], list[StepRecord]]:
    """Run what was added to its end; tokens by sequence, and the steps."""
    built: dict[int, list[int]] = {}
    records = []
    while engine.has_work:
        outcome = engine.step()
        assert outcome is not None
        records.append(outcome.record)
        for token in outcome.tokens:
            built.setdefault(token.sequence, []).append(token.token_id)
    return built, records


def add(engine: BatchedCore, number: int, prompt: Sequence[int], count: int | None) -> None:
    engine.add(number, prompt, engine.sampler(prompt, greedy(count)))


def test_a_prompt_that_comes_while_others_decode_holds_up_none_of_them(
    toys: dict[str, Toy], trusted: ToyReference
) -> None:
    engine = engine_of(toys["ragged"], prefill_budget=8)
    add(engine, 0, [1, 2, 3], 10)
    engine.step()
    long = list(range(100, 130))
    add(engine, 1, long, 2)
    built, records = play(engine)
    assert built[1] == trusted.greedy(long, 2)
    assert built[0] == trusted.greedy([1, 2, 3], 10)[1:]
    assert all(0 in r.requests for r in records[:9]), "a token of the first in every step"
    assert [(r.phase, r.live_rows, r.live_tokens, r.padding_tokens) for r in records[:5]] == [
        ("prompt", 2, 9, 0), ("prompt", 2, 9, 0), ("prompt", 2, 9, 0), ("prompt", 2, 7, 0), ("decode", 2, 2, 0),
    ]  # fmt: skip


def test_the_budget_beside_decode_is_that_of_others_by_default(toys: dict[str, Toy]) -> None:
    assert engine_of(toys["ragged"]).config.prefill_budget == RAGGED_PREFILL_BUDGET
    assert engine_of(toys["ragged"], prefill_budget=7).config.prefill_budget == 7


def test_prompts_that_begin_alike_and_come_together_compute_it_once(
    toys: dict[str, Toy], trusted: ToyReference
) -> None:
    engine = engine_of(toys["ragged"], min_prefix=4)
    prompts = [[*range(20), 200 + i] for i in range(4)]
    for number, prompt in enumerate(prompts):
        add(engine, number, prompt, 3)
    built, records = play(engine)
    assert [built[i] for i in range(4)] == [trusted.greedy(prompt, 3) for prompt in prompts]
    assert sum(r.live_tokens for r in records) == 21 + 3 + 4 * 2


def test_a_pool_is_never_filled_beyond_its_size_and_everybody_ends(toys: dict[str, Toy], trusted: ToyReference) -> None:
    """The fake executor refuses whatever its pool has no room for."""
    engine = engine_of(toys["paged"], min_prefix=2)
    prompts = [[i % 3, *range(1 + 7 * i % 29)] for i in range(12)]
    for number, prompt in enumerate(prompts):
        add(engine, number, prompt, None)
    live = []
    while engine.has_work:
        outcome = engine.step()
        assert outcome is not None
        live.append(outcome.record.live_rows)
        assert engine.stats.kv_cache_usage <= 1
    assert max(live) == 2, "the pool has room for two of 32 tokens"
    engine = engine_of(toys["paged"], min_prefix=2)
    for number, prompt in enumerate(prompts):
        add(engine, number, prompt, 2)
    built, records = play(engine)
    assert [built[i] for i in range(12)] == [trusted.greedy(prompt, 2) for prompt in prompts]
    assert max(r.live_rows for r in records) == 4, "shorter ones share it"


@pytest.fixture(scope="module")
def small(toys: dict[str, Toy]) -> Toy:
    """A pool of 18 tokens, in blocks of 4: 16 can be used."""
    static = toys["static"]
    toy = Toy(static.model, static.store, static.bundle.with_name("small"), static.plan)
    toy.compile(device="fake:paged=18", verify="none")
    return toy


def test_a_prompt_beyond_the_cache_says_its_size_and_what_to_do(small: Toy) -> None:
    engine = engine_of(small)
    said = "the prompt has 17 tokens; the KV cache holds 16: raise the KV cache space, or send a shorter prompt"
    with pytest.raises(InputError, match=said) as caught:
        engine.check([1] * 17)
    assert caught.value.exit_code == 2
    with BundleLLM(small.bundle) as llm, pytest.raises(InputError, match=said):
        llm.generate([[1] * 17], greedy())


def test_an_answer_that_outgrows_the_cache_ends_where_the_cache_does(small: Toy, trusted: ToyReference) -> None:
    with BundleLLM(small.bundle) as llm:
        for requested in (None, 100, 5):
            (output,) = llm.generate([[1] * 12], greedy(requested))
            assert output.outputs[0].token_ids == trusted.greedy([1] * 12, 5), "16 places and the last token"
            assert output.outputs[0].finish_reason == "length"


def test_a_step_that_failed_gives_the_pool_back(toys: dict[str, Toy], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(toys["paged"], slots=4)
    for number in range(3):
        add(engine, number, [number] * 20, 8)
    engine.step()
    monkeypatch.setattr(engine.executor, "run", lambda step: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    monkeypatch.undo()
    assert not engine.has_work
    for number in range(2):
        add(engine, number, [number] * 28, None)
    built, records = play(engine)
    assert [len(tokens) for tokens in built.values()] == [4, 4]
    assert records[0].live_rows == 2


def test_the_fake_device_refuses_what_its_pool_has_no_room_for(small: Toy) -> None:
    executor = open_executor(Bundle.open(small.bundle), 3)
    prompt = list(range(10))
    executor.run(ragged("prompt", [2], [prompt], [0]))
    said = "the slots' blocks take 20 tokens; the cache holds 18"
    with pytest.raises(InputError, match=said):
        executor.run(ragged("prompt", [0], [prompt[:5]], [0]))
    with pytest.raises(InputError, match=said):
        executor.copy_prefix(2, 0, 5)
    with pytest.raises(InputError, match=said):
        executor.import_prefix(0, executor.export_prefix(2, 5))
    executor.copy_prefix(2, 2, 8)
    executor.copy_prefix(2, 0, 5)
    executor.copy_prefix(2, 2, 0)
    executor.run(ragged("prompt", [0, 1], [prompt[5:8], prompt[:8]], [5, 0]))


def test_logits_after_each_token_are_those_of_each_beginning(toys: dict[str, Toy]) -> None:
    prompts = [[5, 6, 7], [8], [9, 10]]
    one, other = (open_executor(Bundle.open(toys["ragged"].bundle), 3) for _ in range(2))
    each = one.run_each(ragged("prompt", [2, 0, 1], prompts, [0, 0, 0]))
    row = 0
    for prompt in prompts:
        for count in range(1, len(prompt) + 1):
            np.testing.assert_allclose(each[row], other.run(ragged("prompt", [0], [prompt[:count]], [0]))[0], rtol=1e-5)
            row += 1
    assert len(each) == row
    assert one.run(ragged("decode", [1, 2], [[1], [2]], [2, 3])).shape == (2, VOCAB)


def test_rows_of_several_tokens_run_one_at_a_time_where_they_are_not_ragged(toys: dict[str, Toy]) -> None:
    executor = open_executor(Bundle.open(toys["exact"].bundle), 3)
    assert len(executor.run_each(exact("prompt", [0], [[1, 2, 3]], [0]))) == 3
    with pytest.raises(InputError, match="rows of several tokens over a past run one at a time on this device"):
        executor.run_each(exact("prompt", [0, 1], [[1, 2], [3, 4]], [0, 0]))
    static = open_executor(Bundle.open(toys["static"].bundle), 3)
    with pytest.raises(InputError, match="its graphs return logits after the last token of a row only"):
        static.run_each(exact("prompt", [0], [[1, 2, 3]], [0]))


@pytest.mark.parametrize("detail", ["paged", "paged=", "paged=3", "paged=x", "fast"])
def test_behind_the_fake_devices_name(toys: dict[str, Toy], detail: str) -> None:
    with pytest.raises(InputError, match=f"--device fake:{detail}: the suffix may be ragged, paged=N"):
        toys["static"].compile(device=f"fake:{detail}")


def test_ragged_steps_are_not_specialised(toys: dict[str, Toy]) -> None:
    with pytest.raises(InputError, match="--specialise: ragged steps have no fixed shape"):
        toys["static"].compile(device="fake:ragged", specialise=True)
