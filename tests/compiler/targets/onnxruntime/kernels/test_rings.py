"""Rings for llmc's attention: tiny models with windows whose caches wrap, beside the same that hold all tokens."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from llmc.artifacts.store.store import Store
from llmc.buckets.bucket import Phase
from llmc.buckets.limits import Limits
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import compile_bundle
from llmc.compiler.targets.onnxruntime.target import OnnxRuntimeTarget
from llmc.errors import ArtifactError, InputError
from llmc.runtime.bundle import Bundle
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.executors import open_executor
from llmc.runtime.executors.onnxruntime.executor import KernelExecutor
from llmc.runtime.llm import BundleLLM
from llmc.runtime.step import ragged
from llmc.testing.toy import toy_plan
from tests.compiler import tiny
from tests.manifests import edit_manifest
from tests.tiers import default_cases

LONGEST, STEP, WINDOW, SLOTS = 320, 16, 70, 4
RING = 128
"""Places for the window and a step, a multiple of 64."""

SPARE = RING - WINDOW
PLAN = toy_plan([(1, STEP, 0), (3, 5, 0), (1, STEP, 304)], [(3, LONGEST - 1)], Limits(LONGEST, 3, STEP, 16))
BACK = SPARE + 1
"""Tokens before the last one written, after which a step may start."""

ARCHITECTURES = {"mistral": 2, "gemma3_text": 1}
"""How many of their two layers have a window."""

CACHES = {"mistral": "f16", "gemma3_text": "f16", "gemma3_text in bfloat16": "bf16", "mistral in 8 bits": "int8"}
"""The precision of the cache."""

Pair = tuple[Path, Path]


@pytest.fixture(scope="module", params=CACHES)
def bundles(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A bundle with rings, every bucket verified and poisoned to the plan's last token, and one that holds all."""
    family = request.param.partition(" ")[0]
    folder = tmp_path_factory.mktemp(family)
    store = Store(folder / "store")
    far = {**tiny.config(family), "sliding_window": WINDOW, "max_position_embeddings": 512}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny.ARCHITECTURES, f"{family}-far", far)
        model = str(tiny.write_model(folder / "model", f"{family}-far"))

        def compiled(name: str, verify: str) -> object:
            options = CompileOptions.of(
                "onnxruntime", quantize="int8", kernels="llmc", verify=verify, sample_top_k=4,
                kv_cache_dtype=CACHES[request.param],
            )  # fmt: skip
            return compile_bundle(model, folder / name, PLAN, options, store, lambda _: None).verification

        verified = compiled("rings", "all")
        assert verified is not None
        assert verified["leak"] == 0
        patch.setattr(OnnxRuntimeTarget, "held_cache", lambda self, cache, *rest: cache)
        compiled("whole", "none")
    return folder / "rings", folder / "whole"


def opened(path: Path) -> KernelExecutor:
    """With NaN in every place that no token made."""
    executor = open_executor(Bundle.open(path), SLOTS, 1)
    assert isinstance(executor, KernelExecutor)
    for slot in range(SLOTS):
        executor.nan_fill(slot, 0, float("nan"))
    return executor


class Both:
    """One step after the other over rings and over all tokens, with the same results to the bit."""

    def __init__(self, bundles: Pair) -> None:
        self.rings, self.whole = map(opened, bundles)
        self._random = np.random.default_rng(1)

    def run(
        self, slots: Sequence[int], counts: Sequence[int], past: Sequence[int], phase: Phase = "prompt",
        each: bool = False,
    ) -> None:  # fmt: skip
        ids = [self._random.integers(0, 200, count).tolist() for count in counts]
        step = ragged(phase, slots, ids, past)
        built, wanted = ((e.run_each if each else e.run)(step) for e in (self.rings, self.whole))
        rows = sum(counts) if each else len(slots)
        assert np.isfinite(built[:rows]).all()
        np.testing.assert_array_equal(built[:rows], wanted[:rows])
        np.testing.assert_array_equal(self.rings.logits()[: len(slots)], self.whole.logits()[: len(slots)])


@default_cases(1)
def test_texts_are_those_of_a_cache_that_holds_all(bundles: Pair) -> None:
    """Prompts in chunks beside decode, twice around the ring; then each conversation goes on; and all from drafts."""
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 200, n).tolist() for n in (150, 9, 240, 75)]
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    short = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    texts, reused = [], []
    for path in bundles:
        with BundleLLM(path, threads=1) as llm:
            first = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
            again = [[*prompt, *text, 7] for prompt, text in zip(prompts, first, strict=True)]
            second = llm.generate(again, short)
            texts.append((first, [output.outputs[0].token_ids for output in second]))
            reused.append([output.num_cached_tokens for output in second])
    assert texts[0] == texts[1]
    assert max(reused[0]) > RING
    with BundleLLM(bundles[0], threads=1, speculative_config={"method": "ngram", "num_speculative_tokens": 4}) as llm:
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, params)] == texts[0][0]


@default_cases(1)
def test_any_steps_give_the_logits_of_a_cache_that_holds_all(bundles: Pair) -> None:
    both = Both(bundles)
    both.run([0, 2, 1], [200, 30, SPARE + 2], [0, 0, 0])
    both.run([1, 0], [1, 3], [SPARE + 2, 200])
    both.run([2, 0, 1], [90, 1, 70], [30, 203, SPARE + 3], each=True)
    for n in range(4):
        both.run([0, 1, 2], [1] * 3, [204 + n, SPARE + 73 + n, 120 + n], "decode")
    # back into what rings still hold, and to the beginning
    both.run([0, 2], [5, 1], [208 - BACK, 124 - 3])
    both.run([1], [131], [0], each=True)


@default_cases(1)
def test_beginnings_travel_with_their_windows(bundles: Pair) -> None:
    both = Both(bundles)
    both.run([0], [300], [0])
    for executor in (both.rings, both.whole):
        executor.copy_prefix(0, 1, 300 - BACK)
        executor.import_prefix(2, executor.export_prefix(0, 299))
        executor.nan_fill(1, 300 - BACK, float("nan"))
        executor.nan_fill(2, 299, float("nan"))
    both.run([1, 2, 0], [7, 1, 1], [300 - BACK, 299, 300])
    for act in (
        lambda: both.rings.copy_prefix(0, 3, 301 - BACK - 1),
        lambda: both.rings.run(ragged("decode", [0], [[5]], [301 - BACK - 1])),
    ):
        with pytest.raises(InputError, match="its windows after 301 tokens"):
            act()


def test_the_largest_logits_of_a_row_in_parts_are_those_of_its_last_token(bundles: Pair) -> None:
    executor = opened(bundles[0])
    top = executor.run_top(ragged("prompt", [0, 1], [[*range(150)], [3]], [0, 0]))
    for ids, logits in zip(top.ids[:2], executor.logits(), strict=False):
        assert ids.tolist() == np.argsort(-logits, kind="stable")[:4].tolist()


def test_a_cache_that_the_graphs_do_not_hold_is_refused(bundles: Pair, tmp_path: Path) -> None:
    path = tmp_path / "other"
    shutil.copytree(bundles[0], path)
    other = {"f16": "bf16", "bf16": "int8", "int8": "f16"}
    edit_manifest(path, lambda m: m["options"].update(kv_cache_dtype=other[m["options"]["kv_cache_dtype"]]))
    executor = open_executor(Bundle.open(path), SLOTS, 1)
    with pytest.raises(ArtifactError, match="is not a graph of the sizes that the manifest states"):
        executor.run(ragged("prompt", [0], [[1]], [0]))


def test_a_bundle_says_its_rings_and_memory_is_theirs(bundles: Pair, request: pytest.FixtureRequest) -> None:
    windows = [t.ring for t in Bundle.open(bundles[0]).cache_shape.kv if t.window]
    assert set(windows) == {RING}
    both = Both(bundles)
    both.run([0], [LONGEST], [0])
    held, all_tokens = (executor.memory()["cache"] for executor in (both.rings, both.whole))
    bundle, seqs = both.rings.bundle, PLAN.limits.max_num_seqs
    assert held * seqs == bundle.cache_bytes * SLOTS
    assert bundle.manifest.options["kv_cache_dtype"] == CACHES[request.node.callspec.params["bundles"]]
    layers = ARCHITECTURES[request.node.callspec.params["bundles"].partition(" ")[0]]
    assert held * 2 * LONGEST == all_tokens * (layers * RING + (2 - layers) * LONGEST)
