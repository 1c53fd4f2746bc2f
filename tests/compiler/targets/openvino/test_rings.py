"""Windows in blocks of their own: slots give back what no window reaches, and every step is the model's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.artifacts.store.store import Store
from llmc.buckets.limits import Limits
from llmc.compiler.architectures.shared.base import WINDOW
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import CompileResult, compile_bundle
from llmc.errors import ArtifactError, InputError
from llmc.runtime.bundle import Bundle
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.executors import open_sized
from llmc.runtime.executors.base import Executor
from llmc.runtime.llm import BundleLLM
from llmc.runtime.step import ragged
from llmc.testing.toy import VOCAB, toy_plan
from tests.compiler import tiny
from tests.manifests import edit_manifest
from tests.tiers import full

pytestmark = full

LONGEST, SLOTS, RING = 256, 3, 64
PLAN = toy_plan([(1, 32, LONGEST)], [(SLOTS, LONGEST)], Limits(LONGEST, SLOTS, LONGEST, 16))
NAN = float("nan")
ALL, MIXED, CAPPED = "mistral", "gpt_oss", "gemma2"
"""Windows in all layers, and in some: with sinks, and with a soft cap, which plain operators compute."""
TEXT = [(7 * i) % VOCAB for i in range(LONGEST)]

Compile = Callable[..., CompileResult]


@cache
def logits(case: str) -> np.ndarray:
    found: np.ndarray = tiny.logits(case, TEXT)
    return found


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    folder = tmp_path_factory.mktemp("rings")

    def compile_(case: str, **options: Any) -> CompileResult:
        model = folder / case
        if not model.exists():
            tiny.write_model(model, case)
        bundle = folder / f"{case}-{len(list(folder.iterdir()))}"
        requested = CompileOptions.of("openvino", **{"quantize": "none", "verify": "none", **options})
        return compile_bundle(str(model), bundle, PLAN, requested, Store(folder / "store"), lambda _: None)

    return compile_


@pytest.fixture
def opened(compiled: Compile) -> Iterator[Callable[..., Executor]]:
    """Executors whose slots are full of NaN."""
    built = []

    def open_(case: str, **options: Any) -> Executor:
        built.append(open_sized(Bundle.open(compiled(case, **options).bundle), SLOTS, LONGEST, threads=1))
        for slot in range(0 if "starter" in options else SLOTS):  # which closes the starter
            built[-1].nan_fill(slot, 0, NAN)
        return built[-1]

    yield open_
    for executor in built:
        executor.close()


def write(executor: Executor, slot: int, end: int, start: int = 0, chunk: int = 24) -> np.ndarray:
    """The text goes into a slot in chunks; the logits after it."""
    for at in range(start, end, chunk):
        found = executor.run(ragged("prompt", [slot], [TEXT[at : min(end, at + chunk)]], [at]))
    return np.array(found[0])


@pytest.mark.parametrize("case", [ALL, MIXED, CAPPED])
def test_buckets_beyond_the_rings_are_verified(compiled: Compile, case: str) -> None:
    result = compiled(case, verify="all")
    assert result.verification["longest"] > 2 * RING
    assert result.verification["mean_kl"] < 1e-9
    assert result.verification["leak"] == 0.0
    rings = {(t.window, t.ring) for t in Bundle.open(result.bundle).cache_shape}
    assert rings == {(WINDOW, RING)} | (set() if case == ALL else {(None, None)})


@pytest.mark.parametrize("case", [ALL, MIXED, CAPPED])
def test_rows_of_any_lengths_go_around_their_rings_together(opened: Callable[..., Executor], case: str) -> None:
    executor, past = opened(case), [0] * SLOTS
    random = np.random.default_rng(3)
    while max(past) < LONGEST - 40:
        rows = random.permutation(SLOTS)[: random.integers(1, SLOTS + 1)].tolist()
        counts = [int(random.choice([1, 2, 31, 40])) for _ in rows]
        tokens = [TEXT[past[r] : past[r] + n] for r, n in zip(rows, counts, strict=True)]
        built = executor.run(ragged("prompt", rows, tokens, [past[r] for r in rows]))
        for row, count in zip(rows, counts, strict=True):
            past[row] += count
        assert np.abs(built - logits(case)[[past[r] - 1 for r in rows]]).max() < 1e-3
    assert min(past) > RING


def test_blocks_that_no_window_reaches_are_given_back(opened: Callable[..., Executor]) -> None:
    executor = opened(ALL)
    write(executor, 0, RING)
    short = executor.memory()["cache"]
    write(executor, 0, LONGEST, RING)
    assert executor.memory()["cache"] <= short * 3 // 2
    assert executor.memory()["cache_pool"] == SLOTS * 3 * (short // 2)
    executor.copy_prefix(0, 0, 0)
    assert executor.memory()["cache"] == 0


@pytest.mark.parametrize("precision", ["f32", "u8"])
def test_slots_that_begin_alike_share_rings_until_one_writes(opened: Callable[..., Executor], precision: str) -> None:
    """A prefix is taken from any place that the ring still holds the window of, also when its owner goes on."""
    executor, end = opened(MIXED, kv_cache_dtype=precision), 150
    most = 1e-3 if precision == "f32" else 0.1
    write(executor, 0, end)
    executor.copy_prefix(0, 1, end - RING + WINDOW - 1)
    executor.copy_prefix(0, 2, end)
    assert np.abs(write(executor, 0, end + 40, end) - logits(MIXED)[end + 39]).max() < most
    executor.nan_fill(1, end, NAN)
    for slot, start in ((1, end - RING + WINDOW - 1), (2, end)):
        found = executor.run(ragged("decode", [slot], [[TEXT[start]]], [start]))
        assert np.abs(found - logits(MIXED)[start]).max() < most
    with pytest.raises(InputError, match="slot 0 holds its windows after 190 tokens"):
        executor.copy_prefix(0, 1, end + 40 - RING + WINDOW - 2)


def test_a_prefix_is_handed_over_as_windows_and_goes_on(opened: Callable[..., Executor]) -> None:
    executor = opened(MIXED)
    write(executor, 0, 150)
    handed = executor.export_prefix(0, 130)
    assert [tensor.shape[1] for tensor in handed] == [130] * len(handed)
    assert all(np.isfinite(tensor).all() for tensor in handed)
    executor.import_prefix(1, handed)
    write(executor, 1, 132, 130)
    with pytest.raises(InputError, match="slot 1 holds its windows after 132 tokens"):
        executor.copy_prefix(1, 2, 129)  # what it would see before the window was never there
    executor.copy_prefix(1, 2, 130)
    assert np.abs(write(executor, 1, 200, 131) - logits(MIXED)[199]).max() < 1e-3
    assert np.abs(write(executor, 2, 131, 130) - logits(MIXED)[130]).max() < 1e-3
    with pytest.raises(InputError, match="slot 1 holds its windows after 200 tokens"):
        executor.export_prefix(1, 120)


def test_fixed_decode_batches_and_starters_go_on_around_rings(compiled: Compile) -> None:
    requested = {"specialise": True, "specialise_memory": 1 << 30, "starter": True}
    prompts, greedy = (TEXT[:150], TEXT[:70], TEXT[9:50]), SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    with BundleLLM(compiled(ALL, **requested).bundle, threads=1, keep_steps=True) as llm:
        first = llm.generate([prompts[0]], SamplingParams(max_tokens=1, temperature=0))
        llm.executor.open_all()
        built = llm.generate(list(prompts), greedy)
        assert any(record.executable.startswith("decode batch=") for record in llm.records)
    wanted = [tiny.greedy(ALL, prompt, 24) for prompt in prompts]
    assert [list(output.outputs[0].token_ids) for output in built] == wanted
    assert list(first[0].outputs[0].token_ids) == wanted[0][:1]


@pytest.mark.parametrize("case", [ALL, MIXED])
def test_a_starter_hands_over_all_that_a_step_may_start_behind(opened: Callable[..., Executor], case: str) -> None:
    """Refused drafts take a slot back as far as its ring holds windows, also where the starter wrote its tokens."""
    executor, start = opened(case, starter=True), 150 - RING + WINDOW - 1
    write(executor, 0, 150)
    executor.open_all()
    with pytest.raises(InputError, match="slot 0 holds its windows after 150 tokens"):
        executor.run(ragged("decode", [0], [[TEXT[start - 1]]], [start - 1]))
    assert np.abs(write(executor, 0, start + 30, start) - logits(case)[start + 29]).max() < 1e-3


def test_a_manifest_of_other_rings_is_refused(compiled: Compile) -> None:
    """Its pools would not be those that the model asks for."""
    bundle = Path(compiled(ALL).bundle)

    def widen(document: dict[str, Any]) -> None:
        for tensor in document["model"]["cache"]:
            tensor["ring"] += 32

    edit_manifest(bundle, widen)
    with pytest.raises(ArtifactError, match="is not a graph of the sizes that the manifest states"):
        open_sized(Bundle.open(bundle), SLOTS, LONGEST, threads=1)
