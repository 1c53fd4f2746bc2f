"""What verifying a bucket finds does not depend on what was verified before it, so that its key names all of it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from llmc.buckets.bucket import Bucket
from llmc.buckets.limits import Limits
from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.pipeline import verification
from llmc.compiler.pipeline.verification import probes_stage, run_parts
from llmc.compiler.stages import Stages
from llmc.compiler.targets import open_target
from llmc.compiler.targets.fake import FakeTarget
from llmc.runtime.bundle import Bundle
from llmc.runtime.executors.fake.executor import FakeExecutor
from llmc.runtime.step import Step
from tests.devices import use, watching
from tests.toy import Toy, toy_plan


def test_a_buckets_outcome_is_the_same_in_every_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device whose results depend a little on pad tokens, and whose cache depends on how a prompt was cut."""
    toy = Toy.make(tmp_path)
    toy.compile(verify="none")

    class Sloppy(FakeExecutor):
        def run(self, step: Step) -> Any:
            logits = super().run(step)
            for slot, start, count in zip(step.slots, step.past_lengths, step.new_lengths, strict=False):
                self._cache[slot, start : start + count] += 1e-3 * step.query
            return logits + 1e-6 * step.token_ids.sum()

    use(monkeypatch, executor=Sloppy)
    stages = Stages(toy.store, open_checkpoint(toy.model), toy.plan, lambda _: None)
    probes = probes_stage(stages, FakeTarget())
    parts = list(toy.plan.buckets)
    outcomes: list[dict[str, Any]] = []
    for seed in range(4):
        random.Random(seed).shuffle(parts)
        built = run_parts(Bundle.open(toy.bundle), stages, probes, parts, lambda *_: None)
        outcomes.append({outcome["bucket"]: outcome for outcome in built})
    assert any(outcome["leak"] for outcome in outcomes[0].values()), "pad tokens do show on this device"
    assert all(found == outcomes[0] for found in outcomes)


def test_what_the_reference_held_is_given_back_before_the_bundle_is_opened(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as the C library allows: what was freed is in its heap, and the bundle's weights come beside it."""
    order: list[str] = []
    for name in ("probes_stage", "trim", "open_executor"):
        called = getattr(verification, name)

        def noted(*args: Any, called: Any = called, name: str = name, **named: Any) -> Any:
            order.append(name)
            return called(*args, **named)

        monkeypatch.setattr(verification, name, noted)
    toy.compile()
    assert order == ["probes_stage", "trim", "open_executor"]


@pytest.mark.parametrize("device", ["fake", "fake:ragged", "fake:paged=128"])
def test_a_past_is_computed_once_for_all_that_continue_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Where no step is padded, the longest prompt of the buckets is the past of decode: no prompt is run for that."""
    toy, seen = Toy.make(tmp_path), []
    plan = toy_plan([(2, 16, 0), (2, 64, 0)], [(1, 32), (2, 64)], Limits(64, 2, 128, 8))
    toy.compile(plan, verify="none", specialise=False, device=device)
    use(monkeypatch, executor=watching(seen.append))
    target = open_target(device)
    stages = Stages(toy.store, open_checkpoint(toy.model), plan, lambda _: None)
    probes = probes_stage(stages, target)
    bundle = Bundle.open(toy.bundle)

    def outcomes(*parts: Bucket) -> list[dict[str, Any]]:
        seen.clear()
        return run_parts(bundle, stages, probes, parts, lambda *_: None)

    def whole() -> int:
        return sum(step.phase == "prompt" and int(step.new_lengths[0]) == 63 for step in seen)

    alone = outcomes(*plan.decode)
    assert whole() == 1
    after = outcomes(plan.prompt[-1], *plan.decode)
    assert whole() == 2, "the runs of the bucket under two poisons"
    assert after[1:] == alone
