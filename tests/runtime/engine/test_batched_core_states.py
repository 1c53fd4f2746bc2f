"""The engine over a cache of states: what a slot holds is reused whole or not at all, whatever comes in between."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.bucket import Bucket
from llmc.buckets.limits import Limits
from llmc.buckets.plan import Plan, Provenance
from llmc.compiler.pipeline import resolve
from llmc.compiler.verification.toy_reference import ToyReference
from llmc.errors import InputError
from llmc.runtime.bundle import Bundle
from llmc.runtime.cache_shape import CacheShape
from llmc.runtime.engine.batched_core import BatchedCore
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.engine.speculation import require_verifiable
from llmc.runtime.executors import open_executor
from llmc.runtime.executors.fake.executor import FakeExecutor
from llmc.runtime.step import exact, pad
from llmc.testing.toy import VOCAB
from tests.manifests import edit_manifest
from tests.tiers import default_cases, examples
from tests.toy import Toy, reference

SLOTS, HIDDEN = 6, 8
ALONE = Plan(
    Limits(32, 4, 64, 8).reading(False),
    tuple(Bucket("prompt", *sizes, 0) for sizes in ((1, 4), (4, 8))) + tuple(Bucket("decode", b, 1, 0) for b in (1, 4)),
    Provenance("test"),
)
"""Its buckets have context 0, whatever a sequence has behind it."""
KINDS = {
    "static": ("fake", True),
    "contextless": ("fake", True),
    "exact": ("fake", False),
    "ragged": ("fake:ragged", False),
    "paged": ("fake:paged=96", False),
}
STATE = {"layer": 0, "name": "faded", "kind": "state", "shape": [HIDDEN], "dtype": "f32"}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return Toy.make(tmp_path_factory.mktemp("states"))


@pytest.fixture(scope="module")
def trusted(toy: Toy) -> ToyReference:
    return reference(toy.model)


@pytest.fixture(scope="module")
def stateful(toy: Toy) -> Callable[[str], Path]:
    """A bundle of each kind that keeps the tokens' sum instead of the tokens: the toy model is that recurrence, too."""

    def compiled(kind: str) -> Path:
        device, specialise = KINDS[kind]
        path = toy.bundle.with_name(f"bundle-{kind}")
        if not path.exists():
            alone = {"plan": ALONE, "verify": "none"} if kind == "contextless" else {}
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(resolve, "cache_of", lambda config: CacheShape.from_json(1, [STATE]))
                toy.compile(bundle=path, device=device, specialise=specialise, **alone)
            edit_manifest(path, lambda manifest: manifest["model"].update(cache=[STATE]))
        return path

    return compiled


def opened(path: Path) -> FakeExecutor:
    """With NaN in every state that no token made."""
    executor = open_executor(Bundle.open(path), SLOTS)
    assert isinstance(executor, FakeExecutor)
    for slot in range(SLOTS):
        executor.nan_fill(slot, 0, float("nan"))
    return executor


BEGINNINGS = [list(range(1, 9)), [*range(1, 9), 40, 41], [7, 7]]
prompts = st.tuples(st.sampled_from(BEGINNINGS), st.lists(st.integers(0, 200), max_size=9), st.integers(1, 6))
work = st.lists(st.one_of(prompts, st.just("step"), st.integers(0, 9)), min_size=4, max_size=24)


@default_cases(2)
@pytest.mark.parametrize("kind", KINDS)
@examples(30)
@given(todo=work)
def test_any_order_of_prompts_chunks_decodes_cancels_and_reuse_gives_the_unbatched_tokens(
    kind: str, stateful: Callable[[str], Path], trusted: ToyReference, todo: list[object]
) -> None:
    executor = opened(stateful(kind))
    engine = BatchedCore(executor.bundle.plan, executor, VOCAB, prefill_budget=8, min_prefix=2)
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
def test_a_conversation_goes_on_from_the_state_that_its_slot_holds(
    kind: str, stateful: Callable[[str], Path], trusted: ToyReference
) -> None:
    engine = BatchedCore((executor := opened(stateful(kind))).bundle.plan, executor, VOCAB, min_prefix=2)
    first, params = [3, 1, 4, 1, 5], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    held = [*first, *trusted.greedy(first, 3)[:2]]
    reused = []
    for number, prompt in enumerate((first, [*first, 8, 8], [*held, 9, 2], held)):
        engine.add(number, prompt, engine.sampler(prompt, params))
        while engine.has_work:
            outcome = engine.step()
            assert outcome is not None
            reused += outcome.admitted
    assert reused == [(0, 0), (1, 0), (2, len(held)), (3, 0)], "other answers have to begin with all that a slot holds"


def test_a_step_from_within_a_state_is_refused(stateful: Callable[[str], Path]) -> None:
    executor = opened(stateful("exact"))
    executor.run(exact("prompt", [0], [[1, 2, 3, 4]], [0]))
    for act in (
        lambda: executor.run(exact("prompt", [0], [[5]], [2])),
        lambda: executor.copy_prefix(0, 1, 3),
        lambda: executor.export_prefix(0, 1),
    ):
        with pytest.raises(InputError, match="states after 4 tokens"):
            act()
    executor.copy_prefix(0, 1, 4)
    one, other = executor.run(exact("decode", [0, 1], [[6], [6]], [4, 4]))
    np.testing.assert_array_equal(one, other)


def test_states_are_neither_handed_over_nor_speculated_from(stateful: Callable[[str], Path]) -> None:
    executor = opened(stateful("exact"))
    executor.run(exact("prompt", [0], [[1, 2]], [0]))
    with pytest.raises(InputError, match="recurrent state, which cannot be imported"):
        executor.import_prefix(1, executor.export_prefix(0, 2))
    with pytest.raises(InputError, match="leave speculation out"):
        require_verifiable(executor)


def test_a_past_beyond_what_slots_hold_is_refused_where_contexts_say_nothing_of_it(
    stateful: Callable[[str], Path],
) -> None:
    executor = opened(stateful("contextless"))
    with pytest.raises(InputError, match=rf"past lengths \[{executor.capacity + 1}\] are not within 0"):
        executor.run(pad(ALONE.decode[0], [0], [[5]], [executor.capacity + 1]))


def test_a_plan_without_contexts_is_refused_for_a_model_that_reads_cached_tokens(toy: Toy) -> None:
    with pytest.raises(InputError, match=r"'contexts' is false.* reads cached tokens; plan for this model"):
        toy.compile(plan=ALONE, bundle=toy.bundle.with_name("refused"))
