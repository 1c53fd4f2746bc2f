"""llmc as an engine of a comparison, over toy bundles of every kind."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from baselines.engines.bundle import Engine

from tests.toy import Toy, greedy, reference


@pytest.fixture
def engine(toy: Toy) -> Engine:
    return Engine(str(toy.bundle), threads=1)


def test_it_reports_its_limits(engine: Engine) -> None:
    about = engine.about()
    assert (about["sequences"], about["length"]) == (4, 32)
    assert about["versions"]["llmc"]
    assert engine.warm() == {}


def test_decode_steps_are_counted_after_the_prompts(engine: Engine) -> None:
    answer = engine.decode([[1, 2, 3], [2, 3, 4], [3, 4, 5]], steps=6)
    assert len(answer["steps"]) in (5, 6)
    assert all(step > 0 for step in answer["steps"])
    assert answer["execute"] and max(answer["execute"]) < 1


def test_prompts_and_streams_are_timed_whole(engine: Engine) -> None:
    assert engine.prefill([1, 2, 3])["seconds"] > 0
    answer = engine.streams([[1, 2], [3, 4]], tokens=5, replay=True)
    assert answer["tokens"] == 10
    assert 0 < answer["execute_s"] < answer["seconds"] and answer["bare_s"] > 0


def test_a_closed_loop_gives_every_request_its_tokens_in_order(engine: Engine) -> None:
    counts = [3, 1, 5, 2, 4, 1, 2]
    answer = engine.serve([[1, 2, 3]] * len(counts), counts, concurrency=3)
    assert [len(times) for times in answer["times"]] == counts
    assert all(times == sorted(times) for times in answer["times"])
    assert all(sent <= times[0] for sent, times in zip(answer["sent"], answer["times"], strict=True))
    assert sum(sent < min(t[0] for t in answer["times"]) for sent in answer["sent"]) == 3, "three at first"


def test_logits_are_the_references(engine: Engine, toy: Toy, tmp_path: Path) -> None:
    texts = [[1, 2, 3, 4, 5], [9, 8, 7]]
    engine.logits(texts, str(tmp_path / "out.npy"))
    wanted = np.concatenate([reference(toy.model).logits(text, range(len(text))) for text in texts])
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), wanted, rtol=1e-4, atol=1e-4)


def test_the_first_text_of_an_answer_comes(engine: Engine, toy: Toy) -> None:
    assert isinstance(engine.first_token("Why?")["text"], str)
    assert greedy(toy.model, [[1, 2]], 1)
