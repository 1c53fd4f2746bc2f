"""The executor contract as tests: slots keep their tokens through any sequence of steps, copies and dummy rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmc.artifacts.bundle.reader import BundleFiles
from llmc.artifacts.bundle.trust import HEAD_BYTES, code_in, code_of_bundle
from llmc.buckets.bucket import Bucket
from llmc.buckets.lookup import prefill_path
from llmc.errors import InputError
from llmc.runtime.bundle import Bundle
from llmc.runtime.executors import open_executor
from llmc.runtime.executors.base import EXECUTABLES, Executor
from llmc.runtime.executors.slots import SlotLengths
from llmc.runtime.step import Step, exact, pad, ragged
from llmc.runtime.top_logits import top_of
from llmc.testing.toy import toy_plan

Array = NDArray[np.float32]
Open = Callable[..., Executor]
"""Opens the bundle with a number of slots (default SLOTS), filled with NaN."""

PLAN = toy_plan()
SLOTS = 6
"""Two more than a batch has rows, for prompts in prefill and for kept prefixes."""

LONGEST, TOP = 32, 8
"""Tokens per slot, and the sample_top_k that bundles are compiled with."""


class Alone:
    """Reference results of a sequence that runs alone in a new executor."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.known: dict[tuple[int, ...], tuple[Array, list[Array]]] = {}

    def __call__(self, tokens: list[int]) -> tuple[Array, list[Array]]:
        """Logits after the last of `tokens`, and the cache contents then."""
        key = tuple(tokens)
        if key not in self.known:
            logits = prefill(self.executor, 0, tokens)
            self.known[key] = logits.copy(), self.executor.export_prefix(0, len(tokens))
        return self.known[key]


def prefill(executor: Executor, slot: int, tokens: list[int]) -> Array:
    """Prefill an empty slot, in PLAN's buckets if shapes are fixed; returns the last logits, [V]."""
    if executor.capabilities.exact:
        whole: Array = executor.run(exact("prompt", [slot], [tokens], [0]))[0]
        return whole
    row: Array | None = None
    for part in prefill_path(PLAN, [len(tokens)]):
        ((start, end),) = part.spans
        row = executor.run(pad(part.bucket, [slot], [tokens[start:end]], [start]))[0]
    assert row is not None
    return row


def opener(bundle: Path, request: pytest.FixtureRequest) -> Open:
    """A function that opens the bundle with NaN-filled caches, closed when the test ends."""

    def open_(slots: int = SLOTS) -> Executor:
        executor = open_executor(Bundle.open(bundle), slots=slots, threads=1)
        request.addfinalizer(executor.close)
        for slot in range(slots):
            executor.nan_fill(slot, 0, float("nan"))
        return executor

    return open_


def close(got: Array, wanted: Array) -> bool:
    """Whether two results are equal up to summation order."""
    return bool(np.allclose(got, wanted, rtol=1e-4, atol=1e-4))


def decode(executor: Executor, new: list[list[int]], held: list[list[int]]) -> Array:
    """Run a decode step over the first slots; in a bucket of four rows and 16 tokens if shapes are fixed."""
    past = [len(h) for h in held]
    if executor.capabilities.exact:
        return executor.run(exact("decode", range(len(new)), new, past))
    return executor.run(pad(Bucket("decode", 4, 1, 16), range(len(new)), new, past))


def each(executor: Executor, phase: str, slots: list[int], tokens: list[list[int]], past: list[int]) -> Array:
    """Logits after every token of rows of any lengths, padded if they differ."""
    step = ragged(phase, slots, tokens, past)  # type: ignore[arg-type]
    return executor.run_each(replace(step, packed=executor.capabilities.ragged))


class Life:
    """Random work over an executor's slots, with the expected tokens tracked."""

    def __init__(self, executor: Executor, alone: Alone, seed: int) -> None:
        self.executor, self.alone = executor, alone
        self.random = np.random.default_rng(seed)
        self.held: list[list[int]] = [[] for _ in range(executor.slots)]
        self.kept = SlotLengths(executor.slots, executor.bundle.cache_shape.rewind)
        self.done: dict[str, int] = {}

    def go_on(self) -> None:
        """Do one random action; rows of a step are compared with the same sequences run alone."""
        action = self.random.choice(["prompt", "decode", "copy", "move"], p=[0.25, 0.55, 0.12, 0.08])
        done = getattr(self, f"_{action}")()
        self.done[action] = self.done.get(action, 0) + bool(done)

    def check_slots(self) -> None:
        """Check that every slot holds what its sequence has when run alone."""
        for slot, tokens in enumerate(self.held):
            if tokens:
                got, wanted = self.executor.export_prefix(slot, len(tokens)), self.alone(tokens)[1]
                assert all(map(close, got, wanted)), f"slot {slot} of {tokens}"

    def _tokens(self, count: int) -> list[int]:
        return [int(t) for t in self.random.integers(0, 256, count)]

    def _prompt(self) -> bool:
        """New prompts, continued prompts, and prompts that restart before the end of the slot's tokens."""
        bucket: Bucket = PLAN.prompt[int(self.random.integers(len(PLAN.prompt)))]
        count = 1 if self.executor.capabilities.exact else int(self.random.integers(1, bucket.batch + 1))
        slots = [int(s) for s in self.random.permutation(self.executor.slots)[:count]]
        starts = []
        for slot in slots:
            held = len(self.held[slot])
            start = int(self.random.choice([0, held, int(self.random.integers(0, held + 1))]))
            start = min(start, bucket.context, LONGEST - bucket.query)
            starts.append(start if start >= self.kept.floor[slot] else 0)
        new = [self._tokens(int(self.random.integers(1, bucket.query + 1))) for _ in slots]
        step = pad(bucket, slots, new, starts)
        self._run(exact("prompt", slots, new, starts) if self.executor.capabilities.exact else step, new)
        return True

    def _decode(self) -> bool:
        """A decode step over the first slots, some rewound, in any bucket that fits."""
        ready = next((s for s, held in enumerate(self.held) if not 0 < len(held) < LONGEST), self.executor.slots)
        most = min(ready, PLAN.limits.max_num_seqs)
        if not most:
            return False
        live = int(self.random.integers(1, most + 1))
        past = [len(held) for held in self.held[:live]]
        for slot, end in enumerate(past):
            back = max(0, end - int(self.random.choice([0, 0, 0, 2])))
            past[slot] = back if back >= self.kept.floor[slot] else end
        fits = [b for b in PLAN.decode if b.batch >= live and b.context >= max(past)]
        new = [self._tokens(1) for _ in past]
        if self.executor.capabilities.exact:
            self._run(exact("decode", range(live), new, past), new)
        else:
            self._run(pad(fits[int(self.random.integers(len(fits)))], range(live), new, past), new)
        return True

    def _run(self, step: Step, new: list[list[int]]) -> None:
        if self.random.random() < 0.5:
            top = self.executor.run_top(step)
            logits = self.executor.logits()
            wanted = top_of(logits[: len(new)], TOP)
            assert np.array_equal(top.values[: len(new)], wanted.values)
            assert np.array_equal(top.ids[: len(new)], wanted.ids)
        else:
            logits = self.executor.run(step)
        for row, slot in enumerate(step.slots):
            start = int(step.past_lengths[row])
            self.held[slot] = self.held[slot][:start] + new[row]
            self.kept.wrote(slot, start, start + len(new[row]))
            alone = self.alone(self.held[slot])[0]
            assert logits[row].argmax() == alone.argmax()
            assert close(logits[row], alone), f"{step.phase} row {row} of {step.slots}"

    def _source_and_target(self) -> tuple[int, int]:
        """Any two slots, possibly the same; the first holds tokens if any slot does."""
        sources = [s for s, held in enumerate(self.held) if held] or [0]
        return int(self.random.choice(sources)), int(self.random.integers(self.executor.slots))

    def _copy(self) -> bool:
        source, target = self._source_and_target()
        length = int(self.random.integers(0, len(self.held[source]) + 1))
        length = length if length >= self.kept.floor[source] else len(self.held[source])
        self.executor.copy_prefix(source, target, length)
        self.held[target] = self.held[source][:length]
        self.kept.copied(source, target, length)
        return length > 0

    def _move(self) -> bool:
        source, target = self._source_and_target()
        if not self.held[source]:
            return False
        self.executor.import_prefix(target, self.executor.export_prefix(source, len(self.held[source])))
        self.held[target] = list(self.held[source])
        self.kept.imported(target, len(self.held[source]))
        return True


class ExecutorContract:
    """The tests that every executor must pass.

    A subclass provides the fixtures `opened` (Open) and `rounds`, the number of random actions of a life, for a bundle
    compiled for PLAN with sample_top_k TOP.
    """

    @pytest.mark.parametrize(("slots", "seed"), [(SLOTS, 0), (SLOTS, 1), (PLAN.limits.max_num_seqs, 2)])
    def test_every_slot_keeps_its_tokens_through_any_work(
        self, opened: Open, rounds: int, slots: int, seed: int
    ) -> None:
        life = Life(opened(slots), Alone(opened(1)), seed)
        for _ in range(rounds):
            life.go_on()
            if life.random.random() < 0.1:  # seldom, because an export may copy tokens to the home slot
                life.check_slots()
        life.check_slots()
        assert all(life.done.values()), "each kind of work was done"

    def test_a_dummy_row_harms_no_slot(self, opened: Open) -> None:
        """A batch of four with one live row, over three slots that decoded before and hold more tokens."""
        executor = opened()
        alone = Alone(opened(1))
        tokens = [[slot, *range(slot + 2)] for slot in range(4)]
        for slot, sequence in enumerate(tokens):
            prefill(executor, slot, sequence)
        decode(executor, [[50 + slot] for slot in range(4)], tokens)
        before = [executor.export_prefix(slot, len(tokens[slot]) + 1) for slot in range(1, 4)]
        for new in range(5):
            decode(executor, [[60 + new]], [[*tokens[0], *range(new + 1)]])
        for slot, parked in enumerate(before, 1):
            for one, other in zip(executor.export_prefix(slot, len(tokens[slot]) + 1), parked, strict=True):
                np.testing.assert_array_equal(one, other)
        executor.copy_prefix(3, 0, 6)
        rows = decode(executor, [[7]], [[*tokens[3], 53][:6]])
        assert close(rows[0], alone([*[*tokens[3], 53][:6], 7])[0])

    def test_a_short_context_leaves_longer_slots_whole(self, opened: Open) -> None:
        executor, alone = opened(), Alone(opened(1))
        long = list(range(40, 70))
        prefill(executor, 1, long)
        prefill(executor, 0, [5, 6])
        decode(executor, [[9]], [[5, 6]])
        for one, other in zip(executor.export_prefix(1, 30), alone(long)[1], strict=True):
            assert close(one, other)

    @pytest.mark.parametrize("method", ["run_top", "run"])
    def test_logits_are_those_of_the_last_step(self, opened: Open, method: str) -> None:
        executor = opened()
        with pytest.raises(InputError, match="no step has run yet"):
            executor.logits()
        step = exact("prompt", [0], [[3, 4, 5]], [0])
        if not executor.capabilities.exact:
            step = pad(Bucket("prompt", 4, 4, 0), [0, 1, 2], [[3, 4, 5], [6], [7, 8, 9, 10]], [0, 0, 0])
        getattr(executor, method)(step)
        rows = len(step.slots)
        assert close(executor.logits()[:rows], opened().run(step)[:rows])

    def test_what_a_slot_does_not_hold_is_refused(self, opened: Open) -> None:
        executor = opened()
        prefill(executor, 0, [1, 2])
        for call in (
            lambda: executor.copy_prefix(0, 1, 3),
            lambda: executor.export_prefix(0, 3),
            lambda: decode(executor, [[1]], [[1, 2, 3]]),
        ):
            with pytest.raises(InputError, match="slot 0 holds 2 tokens, not 3"):
                call()

    def test_a_prefix_of_another_model_is_refused(self, opened: Open) -> None:
        executor = opened()
        prefill(executor, 0, [1, 2])
        prefix = executor.export_prefix(0, 2)
        message = f"{2 * len(prefix)} tensors of 2 tokens do not fit {len(prefix)} of {executor.capacity} tokens"
        with pytest.raises(InputError, match=message):
            executor.import_prefix(1, prefix * 2)

    def test_drafted_tokens_are_scored_in_one_step_as_they_would_be_one_by_one(self, opened: Open) -> None:
        """A token and three drafted ones, of which two are rejected and must not change the next tokens."""
        executor, alone = opened(), Alone(opened(1))
        if not executor.capabilities.scores_each:
            with pytest.raises(InputError, match="its graphs return logits after the last token of a row only"):
                executor.run_each(exact("prompt", [0], [[1, 2]], [0]))
            return
        prompt, drafted = [5, 6, 7, 8, 9], [10, 11, 12, 13]
        prefill(executor, 0, prompt)
        for _ in range(2):  # the second time into existing buffers
            rows = each(executor, "decode", [0], [drafted], [len(prompt)])
            assert len(rows) == 4
            for count, row in enumerate(rows, 1):
                assert close(row, alone(prompt + drafted[:count])[0])
        kept = prompt + drafted[:2]
        assert close(decode(executor, [[14]], [kept])[0], alone([*kept, 14])[0])
        top = executor.run_top(exact("decode", [0], [[15]], [len(kept) + 1]))
        assert close(top.values[0], top_of(alone([*kept, 14, 15])[0][None], TOP).values[0])

    def test_logits_after_every_token_was_scored_are_those_of_the_last_live_ones(self, opened: Open) -> None:
        executor, alone = opened(), Alone(opened(1))
        if not executor.capabilities.scores_each:
            return
        held = [[1, 2], [3, 4, 5]]
        for slot, tokens in enumerate(held):
            prefill(executor, slot, tokens)
        for slots, new in (([0], [[6, 7, 8]]), ([0, 1], [[9], [10]])):
            each(executor, "decode", slots, new, [len(held[slot]) for slot in slots])
            for row, slot in enumerate(slots):
                held[slot] = held[slot] + new[row]
                assert close(executor.logits()[row], alone(held[slot])[0])
        rows = decode(executor, [[11], [12]], held)
        for row, logits in enumerate(rows[:2]):
            assert close(executor.logits()[row], logits)

    def test_everything_that_it_opens_is_declared_and_code_makes_the_bundle_native(
        self, opened: Open, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """These declarations decide which bundles and results need a signature (artifacts/bundle/trust.py)."""
        files = BundleFiles.open(opened().bundle.path)
        manifest, seen = files.manifest, set[str]()
        originals = {verb: getattr(BundleFiles, verb) for verb in ("path", "read", "within")}
        for verb, original in originals.items():

            def noting(self: BundleFiles, name: str, original: Any = original) -> Any:
                seen.add(self.digest(name))
                return original(self, name)

            monkeypatch.setattr(BundleFiles, verb, noting)
        executor = opened()
        executor.open_all()
        executor.warm([(b.phase, b.batch, b.query, b.context) for b in PLAN.buckets])
        executables = {item.blob for item in manifest.executables}
        names = {digest: name for name, digest in manifest.files.items()}
        assert executables <= seen
        for digest in seen:
            declared = executor.description.opens[EXECUTABLES if digest in executables else names[digest]]
            if code_in(originals["read"](files, digest)[:HEAD_BYTES]):
                assert declared != "data" and code_of_bundle(manifest), names.get(digest, "an executable")
