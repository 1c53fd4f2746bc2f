"""What is warmed beside the buckets runs through the functions that serve."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from llmc.buckets.capture.auxiliary import SAMPLING
from llmc.runtime.bundle import Bundle
from llmc.runtime.engine.engine import LLMEngine
from llmc.runtime.executors.fake.executor import FakeExecutor
from llmc.runtime.startup import auxiliary as module
from llmc.runtime.startup.auxiliary import AuxiliaryWarming
from llmc.runtime.startup.opening import EngineOptions, open_engine, open_executor
from llmc.runtime.startup.warming import Warming
from tests.devices import use
from tests.toy import Toy


class Watched(FakeExecutor):
    """Notes what moves, and what is asked for."""

    moved: list[tuple[str, int]]

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.moved = []

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        super().copy_prefix(source, target, length)
        self.moved.append(("copy", length))

    def export_prefix(self, slot: int, length: int) -> Any:
        found = super().export_prefix(slot, length)
        self.moved.append(("export", length))
        return found

    def import_prefix(self, slot: int, prefix: Any) -> None:
        super().import_prefix(slot, prefix)
        self.moved.append(("import", prefix[0].shape[1]))


@pytest.fixture
def engine(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLMEngine]:
    use(monkeypatch, executor=Watched)
    bundle = Bundle.open(toy.bundle)
    options = EngineOptions()
    executor = open_executor(bundle, options)
    list(Warming(executor, bundle.plan).run())
    engine = open_engine(bundle, executor, options)
    yield engine
    engine.close()
    executor.close()


def test_each_kind_of_sampling_is_run_at_each_decode_batch_and_each_move_is_built(engine: LLMEngine, toy: Toy) -> None:
    auxiliary = AuxiliaryWarming(engine, toy.plan)
    ran = list(auxiliary.run())
    assert len(ran) == len(auxiliary)
    assert [one for one in ran if one.error is not None] == []
    assert all(one.seconds > 0 for one in ran)
    names = {one.name for one in ran}
    for kind in SAMPLING:
        for batch in {bucket.batch for bucket in toy.plan.decode}:
            assert f"sampling: {kind}, {batch} rows" in names
    executor = engine.core.executor
    assert isinstance(executor, Watched)
    lengths = {min(b.context, toy.plan.limits.longest_past) for b in toy.plan.buckets if b.context}
    for what in ("copy", "export", "import"):
        assert lengths <= {length for sort, length in executor.moved if sort == what}


def test_a_prefix_that_is_too_large_for_the_host_is_moved_on_the_device_alone(
    engine: LLMEngine, toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOVED_BYTES", 0)
    assert all(one.error is None for one in AuxiliaryWarming(engine, toy.plan).run())
    executor = engine.core.executor
    assert isinstance(executor, Watched)
    longest = max(b.context for b in toy.plan.buckets if b.context <= toy.plan.limits.longest_prompt)
    assert ("copy", longest) in executor.moved
    assert "import" not in {what for what, _ in executor.moved}


def test_graphs_that_return_the_largest_logits_are_requested_them(
    toys: dict[str, Toy], monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = toys["static"]
    toy = Toy(toy.model, toy.store, toy.bundle.with_name("top"), toy.plan)
    toy.compile(sample_top_k=8)
    rows: list[int] = []

    class Topped(FakeExecutor):
        def run_top(self, step: Any) -> Any:
            rows.append(step.batch)
            return super().run_top(step)

    use(monkeypatch, executor=Topped)
    bundle = Bundle.open(toy.bundle)
    executor = open_executor(bundle, EngineOptions())
    engine = open_engine(bundle, executor, EngineOptions())
    list(Warming(executor, bundle.plan).run())
    assert all(one.error is None for one in AuxiliaryWarming(engine, toy.plan).run())
    assert rows == sorted({bucket.batch for bucket in toy.plan.buckets}, reverse=True)
    engine.close()


def test_what_fails_is_named_and_the_others_are_run(
    engine: LLMEngine, toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(logits: Any, samplers: Any) -> Any:
        if logits.shape[0] == 1:
            raise RuntimeError("no program for one row")
        return np.zeros(0)

    monkeypatch.setattr(module, "sample", broken)
    ran = list(AuxiliaryWarming(engine, toy.plan).run())
    failed = {one.name for one in ran if one.error is not None}
    assert failed == {f"sampling: {kind}, 1 rows" for kind in SAMPLING}
