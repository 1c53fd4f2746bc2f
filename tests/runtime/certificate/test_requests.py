"""Random requests: admissible, of every kind, to the ends of every range, and the same for the same seed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.capture.auxiliary import SAMPLING
from llmc.errors import InputError
from llmc.runtime.bundle import Bundle
from llmc.runtime.certificate.requests import STRUCTURED, RandomRequest, RandomRequests, admitted_kinds
from llmc.runtime.engine.engine import LLMEngine
from llmc.runtime.startup.opening import EngineOptions, open_engine, open_executor
from tests.tiers import examples
from tests.toy import Toy


@pytest.fixture(scope="module", params=["static", "paged"])
def engine(toys: dict[str, Toy], request: pytest.FixtureRequest) -> Iterator[LLMEngine]:
    bundle = Bundle.open(toys[request.param].bundle)
    executor = open_executor(bundle, EngineOptions(threads=1))
    engine = open_engine(bundle, executor, EngineOptions())
    yield engine
    engine.close()
    executor.close()


def built(engine: LLMEngine, count: int, seed: int = 0) -> list[RandomRequest]:
    core = engine.core
    kinds, refused = admitted_kinds(engine)
    assert refused == {}
    return list(RandomRequests(core.plan, core.executor, core.vocab_size, kinds, seed, (256,)).take(count))


@examples(10)
@given(seed=st.integers(0, 1 << 40), count=st.integers(1, 60))
def test_every_request_is_admitted(engine: LLMEngine, seed: int, count: int) -> None:
    requests = built(engine, count, seed)
    assert len({one.request.request_id for one in requests}) == count
    for one in requests:
        engine.prepare(one.request)
        assert one.request.params.max_tokens is not None
        assert len(one.request.prompt_token_ids) + one.request.params.max_tokens <= 32
        assert one.cancel_after is None or one.cancel_after < one.request.params.max_tokens


def test_the_same_seed_gives_the_same_requests(engine: LLMEngine) -> None:
    assert built(engine, 40, 7) == built(engine, 40, 7)
    assert built(engine, 40, 7) != built(engine, 40, 8)


def test_of_some_hundred_requests_none_is_missing(engine: LLMEngine) -> None:
    requests = built(engine, 400)
    lengths = {len(one.request.prompt_token_ids) for one in requests}
    assert lengths == set(range(1, 32)), "every length of a prompt"
    assert {one.kind for one in requests} == set(SAMPLING)
    assert {one.request.priority for one in requests} == {-2, -1, 0, 1, 2}
    cancelled = {one.cancel_after for one in requests if one.cancel_after is not None}
    assert {0, 1} < cancelled, "before their first token, and in the middle"
    assert any(one.request.params.n == 2 for one in requests)
    assert any(one.request.params.best_of == 3 for one in requests)
    assert any(len(one.request.prompt_token_ids) > 16 for one in requests), "in pieces"
    prompts = [tuple(one.request.prompt_token_ids) for one in requests]
    shared = sum(prompt[:3] == other[:3] for i, prompt in enumerate(prompts) for other in prompts[i + 1 :])
    assert shared > 20, "prefixes"
    assert all(one.request.params.seed is not None for one in requests if not one.request.params.greedy)
    assert 0 < sum(one.kind == STRUCTURED for one in requests) < 40, "grammars take time"


def test_the_longest_answer_and_the_longest_prompt_come_first(engine: LLMEngine) -> None:
    first, *_ = built(engine, 4)
    assert len(first.request.prompt_token_ids) == 31


def test_what_a_device_refuses_is_not_requested_and_is_named(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def five(params: object) -> None:
        if params.min_p:  # type: ignore[attr-defined]
            raise InputError("min_p: this device has five parameters")

    monkeypatch.setattr(engine.core, "require_offered", five)
    kinds, refused = admitted_kinds(engine)
    assert "min_p" not in kinds
    assert "five parameters" in refused["min_p"]


def test_without_any_kind_there_is_no_request(engine: LLMEngine) -> None:
    with pytest.raises(InputError, match="no kind"):
        RandomRequests(engine.core.plan, engine.core.executor, 10, {}, 0)
