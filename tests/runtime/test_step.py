"""One step: how it is padded, and what an executor makes of it (the fake one, which refuses what others get wrong)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.artifacts.bundle.manifest import Manifest, read_manifest
from llmc.buckets.bucket import Bucket
from llmc.errors import ArtifactError, InputError
from llmc.runtime.bundle import Bundle
from llmc.runtime.executors import open_executor
from llmc.runtime.executors.compilations import CompilationCounter
from llmc.runtime.executors.fake.executor import FakeExecutor, FakeProgram
from llmc.runtime.step import PAD_TOKEN, Step, exact, in_pieces, pad, ragged, rows_apart
from tests.tiers import examples
from tests.toy import Toy, reference

# Padding


def test_padding_fills_the_bucket_and_keeps_rows_in_front() -> None:
    step = pad(Bucket("prompt", 4, 3, 16), [2, 0], [[5, 6, 7], [8]], [4, 9])
    assert step.token_ids.tolist() == [[5, 6, 7], [8, PAD_TOKEN, PAD_TOKEN], [PAD_TOKEN] * 3, [PAD_TOKEN] * 3]
    assert step.past_lengths.tolist() == [4, 9, 0, 0]
    assert step.new_lengths.tolist() == [3, 1, 1, 1], "a dummy row has one token: kernels refuse empty rows"
    assert (step.phase, step.batch, step.query, step.context, step.slots) == ("prompt", 4, 3, 16, (2, 0))
    assert (step.live_tokens, step.padding_tokens) == (4, 8)
    assert {a.dtype for a in (step.token_ids, step.past_lengths, step.new_lengths)} == {np.dtype(np.int64)}


def test_an_exact_step_has_no_padding() -> None:
    step = exact("decode", range(3), [(7,), (8,), (9,)], [5, 2, 11])
    assert (step.batch, step.query, step.context, step.slots) == (3, 1, 11, (0, 1, 2))
    assert (step.live_tokens, step.padding_tokens) == (3, 0)
    assert step.past_lengths.tolist() == [5, 2, 11] and step.new_lengths.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("tokens", "filled"),
    [
        ([(7,), (8, 9, 10), (11, 12)], [[7, PAD_TOKEN, PAD_TOKEN], [8, 9, 10], [11, 12, PAD_TOKEN]]),
        ([(7,), (8,), (9,)], [[7], [8], [9]]),
    ],
)
def test_a_ragged_step_computes_nothing_but_its_tokens(tokens: list[tuple[int, ...]], filled: list[list[int]]) -> None:
    step = ragged("prompt", [4, 0, 2], tokens, [5, 0, 11])
    assert step.token_ids.tolist() == filled
    assert (step.slots, step.past_lengths.tolist(), step.context) == ((4, 0, 2), [5, 0, 11], 11)
    assert step.new_lengths.tolist() == [len(ids) for ids in tokens]
    assert (step.live_tokens, step.padding_tokens, step.packed) == (sum(map(len, tokens)), 0, True)
    assert {a.dtype for a in (step.token_ids, step.past_lengths, step.new_lengths)} == {np.dtype(np.int64)}


def test_rows_that_decode_come_first_in_a_prompt_step_and_are_all_of_a_decode_step() -> None:
    mixed = ragged("prompt", [4, 0, 2], [(7,), (8,), (9, 10, 11)], [5, 6, 0], decode_rows=2)
    assert (mixed.decode_tokens, mixed.live_tokens) == (2, 5)
    assert ragged("decode", [4, 0], [(7,), (8, 9)], [5, 6]).decode_tokens == 3, "drafts are of decode, too"
    assert ragged("prompt", [4], [(7, 8)], [0]).decode_tokens == 0
    assert [part.decode_tokens for part, _ in in_pieces(mixed, 2)] == [2, 0]
    assert [part.decode_tokens for part, _ in rows_apart(mixed)] == [1, 1, 0]


rows = st.lists(
    st.tuples(st.lists(st.integers(0, 256), min_size=1, max_size=9), st.integers(0, 30)), min_size=1, max_size=6
)


@examples(200, database=None, derandomize=True)
@given(rows, st.integers(0, 3), st.integers(0, 5), st.integers(0, 9))
def test_padding_loses_and_adds_nothing(
    live: list[tuple[list[int], int]], more_rows: int, more_query: int, more_context: int
) -> None:
    longest, deepest = max(len(t) for t, _ in live), max(p for _, p in live)
    bucket = Bucket("prompt", len(live) + more_rows, longest + more_query, deepest + more_context)
    step = pad(bucket, range(len(live)), [t for t, _ in live], [p for _, p in live])
    assert step.token_ids.shape == (bucket.batch, bucket.query)
    for row, (tokens, past) in enumerate(live):
        assert step.token_ids[row, : step.new_lengths[row]].tolist() == tokens
        assert step.past_lengths[row] == past
    assert (step.past_lengths[len(live) :] == 0).all() and (step.new_lengths[len(live) :] == 1).all()
    assert step.live_tokens == sum(len(t) for t, _ in live)
    assert step.live_tokens + step.padding_tokens == bucket.batch * bucket.query


# What an executor makes of a step


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    toy = Toy.make(tmp_path_factory.mktemp("toy"))
    toy.compile(verify="none")
    toy.compile(verify="none", specialise=False, bundle=toy.bundle.with_name("exact"))
    return toy


@pytest.fixture
def executor(toy: Toy) -> Iterator[FakeExecutor]:
    yield from opened(toy.bundle)


@pytest.fixture
def exact_executor(toy: Toy) -> Iterator[FakeExecutor]:
    yield from opened(toy.bundle.with_name("exact"))


def opened(path: Path) -> Iterator[FakeExecutor]:
    executor = open_executor(Bundle.open(path))
    assert isinstance(executor, FakeExecutor)
    yield executor
    executor.close()


PROMPTS = [[1, 2, 3], [40, 41], [250, 3, 99, 7, 1]]


def prefilled(executor: FakeExecutor) -> np.ndarray:
    """Slots 0 … 2 hold PROMPTS; returns their logits."""
    if executor.capabilities.exact:
        return np.stack([executor.run(exact("prompt", [i], [p], [0]))[0].copy() for i, p in enumerate(PROMPTS)])
    return executor.run(pad(Bucket("prompt", 4, 8, 0), range(3), PROMPTS, [0, 0, 0]))[:3].copy()


def decoded(executor: FakeExecutor, tokens: list[int], past: list[int]) -> np.ndarray:
    ids, slots = [(t,) for t in tokens], range(len(tokens))
    step = (
        exact("decode", slots, ids, past)
        if executor.capabilities.exact
        else pad(Bucket("decode", 4, 1, 16), slots, ids, past)
    )
    return executor.run(step)[: len(tokens)].copy()


@pytest.mark.parametrize("name", ["executor", "exact_executor"])
def test_prefill_and_decode_are_the_references(toy: Toy, name: str, request: pytest.FixtureRequest) -> None:
    executor = request.getfixturevalue(name)
    trusted = reference(toy.model)
    for slot in range(executor.slots):
        executor.nan_fill(slot, 0, float("nan"))
    got = prefilled(executor)
    for row, prompt in zip(got, PROMPTS, strict=True):
        np.testing.assert_allclose(row, trusted.logits(prompt, [len(prompt) - 1])[0], atol=1e-5)
    got = decoded(executor, [7, 8, 9], [3, 2, 5])
    for row, prompt, token in zip(got, PROMPTS, [7, 8, 9], strict=True):
        np.testing.assert_allclose(row, trusted.logits([*prompt, token], [len(prompt)])[0], atol=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e30])
def test_what_no_live_token_owns_changes_nothing(executor: FakeExecutor, value: float) -> None:
    prefilled(executor)
    clean = decoded(executor, [7, 8, 9], [3, 2, 5])
    prefilled(executor)
    for slot, length in enumerate([3, 2, 5, 0]):
        executor.nan_fill(slot, length, value)
    np.testing.assert_array_equal(decoded(executor, [7, 8, 9], [3, 2, 5]), clean)


def test_rows_without_a_request_are_nan_and_the_buffer_is_reused(executor: FakeExecutor) -> None:
    logits = executor.run(pad(Bucket("prompt", 4, 8, 0), range(3), PROMPTS, [0, 0, 0]))
    assert np.isfinite(logits[:3]).all() and np.isnan(logits[3]).all()
    before = logits[0].copy()
    executor.run(pad(Bucket("decode", 1, 1, 8), [0], [[7]], [3]))
    assert not np.array_equal(logits[0], before)


def test_a_copied_prefix_continues_like_its_source(executor: FakeExecutor) -> None:
    prefilled(executor)
    executor.copy_prefix(2, 0, 5)
    one, _, two = decoded(executor, [7, 8, 7], [5, 2, 5])
    np.testing.assert_array_equal(one, two)


def test_an_exported_prefix_continues_in_another_executor(toy: Toy, executor: FakeExecutor) -> None:
    prefilled(executor)
    prefix = executor.export_prefix(2, 5)
    assert [t.shape for t in prefix] == [(1, 5, 8)]
    wanted = decoded(executor, [1, 1, 9], [3, 2, 5])[2]
    (other,) = opened(toy.bundle.with_name("exact"))
    other.import_prefix(0, prefix)
    np.testing.assert_array_equal(decoded(other, [9], [5])[0], wanted)
    prefix[0][:] = 0
    np.testing.assert_array_equal(decoded(executor, [1, 1, 9], [3, 2, 5])[2], wanted), "it was a copy"


def test_memory_counts_the_cache_and_what_is_open(executor: FakeExecutor) -> None:
    held = executor.memory()
    assert held["cache"] == 4 * 33 * 8 * 4, "slots × (longest context + query) × hidden × float32"
    assert held["open_executables"] == 0
    prefilled(executor)
    assert executor.memory()["open_executables"] == 1
    executor.warm([("decode", 1, 1, 8), ("decode", 4, 1, 32)])
    assert executor.memory()["open_executables"] == 3


def test_names_of_executables(executor: FakeExecutor, exact_executor: FakeExecutor) -> None:
    step = pad(Bucket("decode", 1, 1, 8), [0], [[7]], [0])
    assert executor.executable_of(step) == "decode batch=1 query=1 context=8"
    assert exact_executor.executable_of(step) == "any"


# What an executor refuses


DECODE = pad(Bucket("decode", 2, 1, 16), [0, 1], [[7], [8]], [3, 2])
REFUSED = {
    "slots .0, 4. do not fit": replace(DECODE, slots=(0, 4)),
    "slots .-1, 0. do not fit": replace(DECODE, slots=(-1, 0)),
    "do not fit a batch of 2": replace(DECODE, slots=(0, 1, 2)),
    "two rows of one step share a slot": replace(DECODE, slots=(0, 0)),
    "decode runs over the first slots, in order": replace(DECODE, slots=(1, 0)),
    r"new lengths \[1, 2\] are not within 1 … 1": replace(DECODE, new_lengths=np.array([1, 2])),
    r"new lengths \[0, 1\] are not within 1 … 1": replace(DECODE, new_lengths=np.array([0, 1])),
    r"past lengths \[3, 17\] are not within 0 … 16": replace(DECODE, past_lengths=np.array([3, 17])),
    r"past lengths \[-1, 2\] are not within": replace(DECODE, past_lengths=np.array([-1, 2])),
    "slot 1 holds 2 tokens, not 3": replace(DECODE, past_lengths=np.array([3, 3])),
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_step_that_the_cache_cannot_serve(executor: FakeExecutor, message: str) -> None:
    prefilled(executor)
    with pytest.raises(InputError, match=message):
        executor.run(REFUSED[message])


def test_more_tokens_than_the_cache_has_room_for(toy: Toy) -> None:
    executor = FakeExecutor(Bundle.open(toy.bundle), slots=4, capacity=16, threads=1)
    executor.run(pad(Bucket("prompt", 1, 16, 0), [0], [list(range(16))], [0]))
    with pytest.raises(InputError, match="past and query of a decode step take 17 tokens; the cache holds 16"):
        executor.run(pad(Bucket("decode", 2, 1, 16), [0], [[1]], [16]))


def test_a_prefix_that_the_slot_does_not_hold(executor: FakeExecutor) -> None:
    prefilled(executor)
    for call in (lambda: executor.copy_prefix(1, 0, 3), lambda: executor.export_prefix(1, 3)):
        with pytest.raises(InputError, match="slot 1 holds 2 tokens, not 3"):
            call()


@pytest.mark.parametrize("step", [
    pad(Bucket("decode", 3, 1, 16), [0], [[1]], [0]), pad(Bucket("prompt", 1, 5, 0), [0], [[1]], [0]),
    pad(Bucket("decode", 1, 1, 9), [0], [[1]], [0]),
])  # fmt: skip
def test_a_shape_that_was_not_compiled(toy: Toy, executor: FakeExecutor, step: Step) -> None:
    shape = f"{step.phase} batch {step.batch}, query {step.query}, context {step.context}"
    hint = f"llmc compile {toy.model.name} --device fake -o {toy.bundle}"
    for call in (executor.run, executor.executable_of):
        with pytest.raises(
            ArtifactError, match=f"no executable for {shape}; compile it into the bundle: {hint}"
        ) as caught:
            call(step)
        assert caught.value.exit_code == 5
    with pytest.raises(ArtifactError, match="no executable for"):
        executor.warm([(step.phase, step.batch, step.query, step.context)])


def test_an_executable_of_another_shape_than_the_manifest_says(toy: Toy, tmp_path: Path) -> None:
    """Two entries swap their blobs: digests hold, sizes of the graph do not."""
    manifest = read_manifest(toy.bundle)
    members = manifest.to_dict()
    first, second = members["executables"][-2:]
    first["blob"], second["blob"] = second["blob"], first["blob"]
    bundle = Bundle.open(toy.bundle)
    bundle.files.manifest = Manifest(members)
    executor = open_executor(bundle)
    wrong = pad(Bucket(first["phase"], first["batch"], first["query"], first["context"]), [0], [[1]], [0])
    with pytest.raises(
        ArtifactError, match=r"compiled for batch, query, context \(.*\) was given \(.*\); compile again"
    ):
        executor.run(wrong)


def test_what_is_no_executable(executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    for data in (b"", b"[]", b"{}", b'{"format": 2}', b"\xff"):
        monkeypatch.setattr(executor.bundle.files, "read", lambda _, data=data: data)
        with pytest.raises(ArtifactError, match=r"is not an executable of the fake device \(.*compile again"):
            executor.warm([("decode", 1, 1, 8)])
    with pytest.raises(ValueError, match="format 2, not 1"):
        FakeProgram.load({"format": 2}, Path())


# Compilations


def test_compilations_are_counted_with_their_names() -> None:
    counter = CompilationCounter()
    assert (counter.count, counter.compiled) == (0, ())
    counter.record("decode batch=1")
    counter.record("prompt batch=2")
    assert (counter.count, counter.compiled) == (2, ("decode batch=1", "prompt batch=2"))
