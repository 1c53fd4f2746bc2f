"""The engine over a cache of rings: what a slot holds is reused as far as its windows allow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.compiler.verification.toy_reference import ToyReference
from llmc.errors import InputError
from llmc.runtime.bundle import Bundle
from llmc.runtime.cache_shape import Rewind
from llmc.runtime.engine.batched_core import BatchedCore
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.engine.speculation import SpeculativeConfig
from llmc.runtime.executors import open_executor
from llmc.runtime.executors.fake.executor import FakeExecutor
from llmc.runtime.step import exact
from llmc.testing.toy import VOCAB, toy_plan
from tests.tiers import default_cases, examples
from tests.toy import Toy, reference

SLOTS, WINDOW = 6, 5
PLAN = toy_plan()
RING = -(-(WINDOW + PLAN.limits.block_size) // PLAN.limits.block_size) * PLAN.limits.block_size
KINDS = {"static": ("fake", True), "exact": ("fake", False), "ragged": ("fake:ragged", False)}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return Toy.make(tmp_path_factory.mktemp("rings"), sliding_window=WINDOW)


@pytest.fixture(scope="module")
def trusted(toy: Toy) -> ToyReference:
    return reference(toy.model)


@pytest.fixture(scope="module")
def ringed(toy: Toy) -> Callable[[str], Path]:
    """A bundle of each kind, verified, poisoned, to the plan's last token."""

    def compiled(kind: str) -> Path:
        device, specialise = KINDS[kind]
        path = toy.bundle.with_name(f"bundle-{kind}")
        if not path.exists():
            result = toy.compile(bundle=path, device=device, specialise=specialise, verify="all")
            assert result.verification is not None
            assert result.verification["leak"] == 0
        return path

    return compiled


def opened(path: Path) -> FakeExecutor:
    """With NaN in every place that no token made."""
    executor = open_executor(Bundle.open(path), SLOTS)
    assert isinstance(executor, FakeExecutor)
    for slot in range(SLOTS):
        executor.nan_fill(slot, 0, float("nan"))
    return executor


LONG = [*range(1, 20)]
prompts = st.tuples(
    st.sampled_from([LONG, [*LONG, 40, 41], LONG[:9], [7, 7]]), st.lists(st.integers(0, 9), max_size=3),
    st.integers(1, 8),
)  # fmt: skip
work = st.lists(st.one_of(prompts, st.just("step"), st.integers(0, 9)), min_size=4, max_size=24)


@default_cases(2)
@pytest.mark.parametrize("kind", [*KINDS, "drafted"])
@examples(20)
@given(todo=work)
def test_any_order_of_prompts_chunks_decodes_cancels_and_reuse_gives_the_unbatched_tokens(
    kind: str, ringed: Callable[[str], Path], trusted: ToyReference, todo: list[object]
) -> None:
    executor = opened(ringed("ragged" if kind == "drafted" else kind))
    drafts = SpeculativeConfig(num_speculative_tokens=16) if kind == "drafted" else None
    engine = BatchedCore(executor.bundle.plan, executor, VOCAB, prefill_budget=8, min_prefix=2, speculation=drafts)
    requested: dict[int, tuple[list[int], int]] = {}
    built: dict[int, list[int]] = {}
    cancelled: set[int] = set()

    def step() -> None:
        outcome = engine.step()
        for token in () if outcome is None else outcome.tokens:
            built.setdefault(token.sequence, []).append(token.token_id)

    for one in todo:
        if isinstance(one, tuple):
            beginning, rest, count = one
            number, prompt = len(requested), [*beginning, *rest]
            requested[number] = (prompt, count)
            params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
            engine.add(number, prompt, engine.sampler(prompt, params))
        elif (
            isinstance(one, int)
            and one in requested
            and one not in cancelled
            and len(built.get(one, [])) < requested[one][1]
        ):
            engine.cancel(one)
            cancelled.add(one)
        elif engine.has_work:
            step()
    while engine.has_work:
        step()
    for number, (prompt, count) in requested.items():
        expected, found = trusted.greedy(prompt, count), built.get(number, [])
        assert found == expected[: len(found)]
        assert number in cancelled or len(found) == count


@pytest.mark.parametrize("kind", KINDS)
def test_a_beginning_is_reused_while_the_ring_has_its_window(kind: str, ringed: Callable[[str], Path]) -> None:
    engine = BatchedCore((executor := opened(ringed(kind))).bundle.plan, executor, VOCAB, min_prefix=2)
    assert engine.config.rewind == Rewind(rings=((WINDOW, RING),))
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    saved = {}
    # a slot that holds 22 tokens lost its first 22 - RING; 17 of them need the window before the 17th
    long = [*range(1, 23)]
    for number, prompt in enumerate((long, [*long[:17], 90, 91], [*long[:8], 92, 93])):
        engine.add(number, prompt, engine.sampler(prompt, params))
        while engine.has_work:
            outcome = engine.step()
            assert outcome is not None
            saved |= dict(outcome.admitted)
    assert saved[1] > 8
    assert saved[2] == 0


def test_a_step_from_before_the_window_is_refused(ringed: Callable[[str], Path]) -> None:
    executor = opened(ringed("exact"))
    executor.run(exact("prompt", [0], [list(range(1, 23))], [0]))
    first = 22 - RING + WINDOW - 1
    for act in (
        lambda: executor.run(exact("prompt", [0], [[5]], [first - 1])),
        lambda: executor.copy_prefix(0, 1, first - 1),
        lambda: executor.export_prefix(0, first - 1),
    ):
        with pytest.raises(InputError, match="its windows after 22 tokens"):
            act()
    executor.copy_prefix(0, 1, first)
    executor.import_prefix(2, executor.export_prefix(0, first))
    with pytest.raises(InputError, match="its windows"):
        executor.copy_prefix(2, 3, first - 1)
    one, other, third = executor.run(exact("decode", [0, 1, 2], [[6]] * 3, [first] * 3))
    assert (one == other).all()
    assert (one == third).all()


def test_a_bundle_says_its_rings_and_memory_is_theirs(ringed: Callable[[str], Path]) -> None:
    executor = opened(ringed("static"))
    key = executor.bundle.cache_shape.kv[0]
    assert (key.window, key.ring) == (WINDOW, RING)
    assert executor.memory()["cache"] == SLOTS * RING * 8 * 4
