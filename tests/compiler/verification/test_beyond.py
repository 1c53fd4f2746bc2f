"""Decode beyond the longest prompt, and where a model turns, is verified, or the words say that it was not."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from llmc.artifacts.bundle.manifest import read_manifest
from llmc.artifacts.store.store import Store
from llmc.buckets.bucket import Bucket
from llmc.buckets.limits import Limits
from llmc.buckets.plan import Plan
from llmc.cli.results import verified_line
from llmc.compiler.checkpoint.base import Checkpoint
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import compile_bundle
from llmc.compiler.verification import parts, transformers_reference
from llmc.compiler.verification.parts import STEPPED, past_length, steps_beyond
from llmc.errors import VerificationError
from llmc.runtime.executors.fake.executor import FakeExecutor
from llmc.runtime.step import Step
from llmc.testing.toy import toy_plan
from tests.compiler import tiny
from tests.tiers import default_cases
from tests.toy import Toy

LIMITS = Limits(32, 4, 64, 8, 12)
PLAN = toy_plan(limits=LIMITS)
"""Prompts of at most 12 tokens; the last step of a sequence of 32 continues 30."""


def spoil(monkeypatch: pytest.MonkeyPatch, wrong: range, phase: str = "decode") -> None:
    """Let the logits of rows that continue so many tokens be wrong, and nothing else."""
    run = FakeExecutor.run

    def spoiled(self: FakeExecutor, step: Step) -> Any:
        logits = run(self, step)
        for row in range(len(step.slots)):
            if step.phase == phase and step.past_lengths[row] in wrong:
                logits[row] *= -1
        return logits

    monkeypatch.setattr(FakeExecutor, "run", spoiled)


@pytest.mark.parametrize("device", ["fake", "fake:ragged", "fake:paged=128"])
@pytest.mark.parametrize("first", [13, 20, 30])
def test_what_is_wrong_only_beyond_the_longest_prompt_is_refused(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, first: int, device: str
) -> None:
    spoil(monkeypatch, range(first, 32))
    with pytest.raises(VerificationError, match=r"decode\[\dx1\+32\]"):
        toy.compile(PLAN, device=device)


def test_a_past_that_decode_spoils_is_refused(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the logits of any step: what a step leaves in the cache for those after it."""
    run = FakeExecutor.run

    def spoiled(self: FakeExecutor, step: Step) -> Any:
        logits = run(self, step).copy()
        for row, slot in enumerate(step.slots):
            if step.past_lengths[row] == 27:
                self._cache[slot, 27] *= -1
        return logits

    monkeypatch.setattr(FakeExecutor, "run", spoiled)
    with pytest.raises(VerificationError, match=r"decode\[\dx1\+32\]"):
        toy.compile(PLAN)


@pytest.mark.parametrize("limits", [LIMITS, Limits(32, 4, 64, 8)], ids=["beyond the longest prompt", "within prompts"])
def test_what_is_wrong_only_where_a_window_begins_to_slide_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: Limits
) -> None:
    spoil(monkeypatch, range(23, 26))
    with pytest.raises(VerificationError, match=r"decode\[\dx1\+32\]"):
        Toy.make(tmp_path, sliding_window=24).compile(toy_plan(limits=limits))


@default_cases(1)
@pytest.mark.parametrize("window", [20, None], ids=["sound", "window ignored"])
def test_a_tiny_model_whose_window_slides_beyond_the_longest_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    """Graphs that slide a window of 20 tokens, and a reference that does so too, or never."""
    model = tiny.write_model(tmp_path / "model", "mistral")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "sliding_window": 20}))
    load = transformers_reference.load_real_model

    def loaded(checkpoint: Checkpoint) -> Any:
        built = load(checkpoint)
        built.config.sliding_window = window
        return built

    monkeypatch.setattr(transformers_reference, "load_real_model", loaded)
    known = tiny.tiny_plan()
    plan = Plan(Limits(48, 3, 48, 8, 12), known.buckets, known.provenance)
    requested, store = CompileOptions("onnxruntime", quantize="none"), Store(tmp_path / "store")
    compiled = partial(compile_bundle, str(model), tmp_path / "bundle", plan, requested, store, lambda _: None)
    if window is None:
        with pytest.raises(VerificationError, match=r"in decode\[\dx1\+48\]: "):
            compiled()
    else:
        found = compiled().verification
        assert found["unreached"] == [] and found["longest"] == 47


def test_a_far_end_that_is_reached_needs_no_words(toy: Toy) -> None:
    toy.compile(PLAN)
    found = read_manifest(toy.bundle).verification
    assert found["unreached"] == [] and found["longest"] == 31
    assert "not run" not in verified_line(found, 1)


def test_a_far_end_beyond_the_bound_is_said_in_words(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "STEPPED", 0.0)
    toy.compile(PLAN)
    found = read_manifest(toy.bundle).verification
    assert found["longest"] == 13
    assert found["unreached"] == [str(b) for b in sorted(PLAN.decode, key=lambda b: b.context) if b.context > 12]
    assert verified_line(found, 1).endswith(
        f"not run to the longest sequences that they take: {', '.join(found['unreached'])}"
    )


def test_outcomes_of_before_are_not_taken_for_what_reaches_the_end(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "STEPPED", 0.0)
    toy.compile(PLAN)
    monkeypatch.undo()
    toy.compile(PLAN)
    assert "verify" in toy.built_stages and read_manifest(toy.bundle).verification["unreached"] == []


def test_another_decode_bucket_within_prompts_leaves_those_outcomes(toy: Toy) -> None:
    """What decode steps lengthened is keyed by all that made it; other pasts by the prompt graphs alone."""
    within = toy_plan(limits=Limits(32, 4, 64, 8))
    toy.compile(within)
    ran: list[int] = []
    more = toy_plan(decode=[*[(b.batch, b.context) for b in within.decode], (2, 24)], limits=within.limits)
    toy.compile(more, report=lambda e: ran.append(e.total) if type(e).__name__ == "VerifyReport" else None)
    assert ran and ran[0] == 3, "the bucket, greedy texts and the text"


@pytest.mark.parametrize(
    ("limits", "parameters", "steps"),
    [
        (LIMITS, 1, 18), (Limits(32, 4, 64, 8), 1, 0), (Limits(32, 4, 64, 8, 30), 1, 0),
        (Limits(32, 4, 64, 8, 29), 1, 1),
        (Limits(4096, 4, None, 128, 512), 135_000_000, 347), (Limits(4096, 4, None, 128, 512), 8_000_000_000, 5),
    ],
)  # fmt: skip
def test_steps_are_those_to_the_end_or_as_many_as_the_bound_has_room_for(
    limits: Limits, parameters: int, steps: int
) -> None:
    assert steps_beyond(limits, parameters) == steps
    assert steps * 2 * parameters * parts.LEAST <= STEPPED


@pytest.mark.parametrize(
    ("bucket", "tokens"),
    [
        (Bucket("decode", 1, 1, 8), 12), (Bucket("decode", 1, 1, 12), 12), (Bucket("decode", 1, 1, 13), 30),
        (Bucket("decode", 1, 1, 32), 30), (Bucket("prompt", 1, 8, 24), 12), (Bucket("prompt", 1, 8, 0), 0),
    ],
)  # fmt: skip
def test_decode_alone_has_a_past_beyond_the_longest_prompt(bucket: Bucket, tokens: int) -> None:
    assert past_length(bucket, LIMITS, steps_beyond(LIMITS, 1)) == tokens
