"""Rings for ONNX Runtime's own attention: tiny models whose caches move down many times, beside ones that hold all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

from llmc.artifacts.store.store import Store
from llmc.buckets.bucket import Bucket
from llmc.buckets.limits import Limits
from llmc.buckets.plan import Plan, Provenance
from llmc.compiler.architectures.shared.base import WINDOW
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import compile_bundle
from llmc.compiler.targets.onnxruntime import target
from llmc.compiler.targets.onnxruntime.target import OnnxRuntimeTarget
from llmc.errors import InputError
from llmc.runtime import host
from llmc.runtime.bundle import Bundle
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.executors import open_executor
from llmc.runtime.executors.onnxruntime import executor as executor_module
from llmc.runtime.executors.onnxruntime.executor import OnnxRuntimeExecutor
from llmc.runtime.llm import BundleLLM
from llmc.runtime.step import exact
from llmc.testing.executors import SLOTS, TOP, Alone, Life, opener
from llmc.testing.toy import toy_plan
from tests.compiler import tiny
from tests.tiers import default_cases

ROOM, BACK, LONGEST = 7, 3, 48
PLAN = Plan(
    Limits(LONGEST, 3, 64, 16),
    tuple(Bucket("prompt", *sizes) for sizes in ((1, 24, 0), (3, 8, 0), (1, 24, 24)))
    + tuple(Bucket("decode", batch, 1, LONGEST) for batch in (1, 3)),
    Provenance("test"),
)
ARCHITECTURES = ["mistral", "gpt_oss"]
"""Windows in all layers; in every second one, with sinks."""


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    """Rings of few tokens, so that tiny texts are longer."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (host, executor_module, target):
            patch.setattr(module, "ROLLING_ROOM", ROOM)
        patch.setattr(target, "PROMPT_CHUNK", BACK)
        yield


@pytest.fixture(scope="module", params=ARCHITECTURES)
def bundles(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A bundle with rings, every bucket verified and poisoned to the plan's last token, and one that holds all."""
    folder = tmp_path_factory.mktemp(request.param)
    model = str(tiny.write_model(folder / "model", request.param))
    store = Store(folder / "store")
    options = CompileOptions("onnxruntime", quantize="none", verify="all")
    result = compile_bundle(model, folder / "rings", PLAN, options, store, lambda _: None)
    assert result.verification is not None
    assert result.verification["max_abs"] < 1e-3
    assert result.verification["leak"] < 1e-4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OnnxRuntimeTarget, "held_cache", lambda _, cache, *rest: cache)
        compile_bundle(
            model, folder / "whole", PLAN, CompileOptions("onnxruntime", quantize="none", verify="none"), store,
            lambda _: None,
        )  # fmt: skip
    return folder / "rings", folder / "whole"


def opened(path: Path) -> OnnxRuntimeExecutor:
    executor = open_executor(Bundle.open(path), 4)
    assert isinstance(executor, OnnxRuntimeExecutor)
    for slot in range(4):
        executor.nan_fill(slot, 0, float("nan"))
    return executor


@default_cases(1)
def test_texts_are_those_of_a_cache_that_holds_all(bundles: tuple[Path, Path]) -> None:
    prompts = [list(range(5, 28)), [7, 9], list(range(40, 49))]
    params = SamplingParams(max_tokens=22, temperature=0, ignore_eos=True)
    texts = []
    for path in bundles:
        with BundleLLM(path, threads=1) as llm:
            texts.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
    assert texts[0] == texts[1]


def test_any_steps_give_the_logits_of_a_cache_that_holds_all(bundles: tuple[Path, Path]) -> None:
    """Prompts in rows of one length, chunks longer than a ring has room for, decode, and starts within a ring."""
    random, (rings, whole) = np.random.default_rng(1), map(opened, bundles)

    def both(phase: str, slots: list[int], count: int, past: list[int], each: bool = False) -> None:
        ids = random.integers(0, 250, (len(slots), count)).tolist()
        step = exact(phase, slots, ids, past)  # type: ignore[arg-type] # a phase
        built, wanted = ((e.run_each if each else e.run)(step) for e in (rings, whole))
        np.testing.assert_allclose(
            built[: len(ids) * (count if each else 1)], wanted[: len(ids) * (count if each else 1)], atol=1e-4
        )

    both("prompt", [0, 1], 19, [0, 0])
    both("prompt", [2], 3, [0])
    both("prompt", [0, 1, 2], 6, [19, 19, 3])
    for n in range(9):
        both("decode", [0, 1, 2], 1, [25 + n, 25 + n, 9 + n])
    both("decode", [0], 1, [34 - BACK])
    both("prompt", [1], 9, [34], each=True)
    for executor in (rings, whole):
        executor.copy_prefix(1, 3, 43)
        executor.import_prefix(0, executor.export_prefix(3, 43))
    both("decode", [0, 1], 1, [43, 43])
    with pytest.raises(InputError, match="its windows after 44 tokens"):
        rings.copy_prefix(0, 2, 42)
    assert rings.memory()["cache"] < whole.memory()["cache"]


def test_a_bundle_says_its_rings(bundles: tuple[Path, Path]) -> None:
    rings = {t.ring for t in Bundle.open(bundles[0]).cache_shape.kv if t.window}
    assert rings == {WINDOW + BACK}
    assert not Bundle.open(bundles[1]).cache_shape.rewind.rings


@pytest.fixture(scope="module", params=ARCHITECTURES)
def specialised(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of fixed shapes, every bucket verified and poisoned: staging and decode have rings of their own."""
    folder = tmp_path_factory.mktemp(f"{request.param}-specialised")
    model = str(tiny.write_model(folder / "model", request.param))
    options = CompileOptions("onnxruntime", quantize="none", specialise=True, verify="all", sample_top_k=TOP)
    result = compile_bundle(model, folder / "bundle", toy_plan(), options, Store(folder / "store"), lambda _: None)
    assert result.verification is not None
    assert result.verification["max_abs"] < 1e-3
    assert result.verification["leak"] < 1e-4
    return folder / "bundle"


@default_cases("mistral-4")
@pytest.mark.parametrize("slots", [SLOTS, 4])
def test_fixed_shapes_keep_the_tokens_of_rings_through_any_work(
    specialised: Path, request: pytest.FixtureRequest, slots: int
) -> None:
    """Prompts on staging, decode in rows of several lengths that move down, dummy rows, copies, exports and imports."""
    opened = opener(specialised, request)
    alone = Alone(opened(1))
    for seed in range(2):
        life = Life(opened(slots), alone, seed)
        for _ in range(150):
            life.go_on()
            if life.random.random() < 0.1:
                life.check_slots()
        life.check_slots()
        assert all(life.done.values())


@default_cases(1)
def test_fixed_shapes_have_no_more_token_slots_than_rings(specialised: Path) -> None:
    """By the graphs themselves: a decode step behind 32 tokens reads the places of a ring and its room."""
    bundle = Bundle.open(specialised)
    rings = {t.entry: t.ring for t in bundle.cache_shape.kv if t.window}
    assert set(rings.values()) == {WINDOW + BACK}
    decode = [e for e in bundle.manifest.executables if e.phase == "decode" and e.context == max(
        b.context for b in toy_plan().decode)]  # fmt: skip
    assert decode
    for executable in decode:
        model = onnx.load_from_string(bundle.files.path(executable.blob).read_bytes())
        offsets = {i.name: i.type.tensor_type.shape.dim[2].dim_value for i in model.graph.input if len(
            i.type.tensor_type.shape.dim) == 4}  # fmt: skip
        for entry, ring in rings.items():
            assert ring is not None
            assert offsets[f"past_{entry}"] == ring + ROOM
