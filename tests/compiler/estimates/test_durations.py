"""How long the shared parts of a compile take: learnt from the store where the model is as large, else by its size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmc.artifacts.key import Key
from llmc.artifacts.store.store import Store
from llmc.buckets.limits import Limits
from llmc.buckets.plan import Plan
from llmc.buckets.planner.planner import make_plan
from llmc.compiler.architectures.shared.size import ModelSize, Weights
from llmc.compiler.estimates.durations import Durations, VerifyWork, count
from llmc.compiler.estimates.footprint import Footprint
from llmc.compiler.options import CompileOptions
from llmc.compiler.targets import open_target
from llmc.compiler.targets.costs import LAYERS, PARAMETERS, Timing
from llmc.compiler.targets.fake import FakeTarget
from llmc.runtime.step import Step
from llmc.settings import Settings
from tests.devices import use, watching
from tests.tiers import default_cases
from tests.toy import Toy, toy_plan

SMALL = ModelSize(LAYERS, 576, 1536, 9, 3, 64, 49152, tied=True)
PLAN = make_plan(Limits(256, 2), "linear")
WORK = VerifyWork(executables=1, steps=10, tokens=1000)
BIG = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}  # fmt: skip


def durations(device: str = "hpu", parameters: int = PARAMETERS, store: Store | None = None) -> Durations:
    target = open_target(device)
    return Durations(target.costs, target.configure(CompileOptions.of(device)), SMALL, parameters, store)


def verifying(parameters: int = PARAMETERS, **options: Any) -> float:
    """Seconds that verifying PLAN takes for a model of so many parameters."""
    options = {"device": "hpu", **options}
    target = open_target(options["device"])
    configured = target.configure(CompileOptions.of(options.pop("device"), **options))
    found = Footprint(SMALL, target, configured, PLAN.limits, weights=[Weights(parameters)])
    return found.verification_seconds(PLAN.buckets)


def test_costs_grow_with_what_they_are_of() -> None:
    cost = Timing(fixed=1, layers=10, parameters=100)
    assert cost.of(LAYERS, PARAMETERS) == 111
    assert cost.of(2 * LAYERS, PARAMETERS // 2) == 1 + 20 + 50


def test_verification_is_part_of_every_estimate_and_grows_with_the_model() -> None:
    small, large = verifying(), verifying(parameters=10 * PARAMETERS)
    assert 20 < small < 100
    assert 3 * small < large < 10 * small
    assert verifying(verify="none") == 0
    assert verifying(verify="all") >= small


def test_it_costs_what_is_counted() -> None:
    each = open_target("hpu").costs.verifying
    costs = (each.begin, 1), (each.opened, 7), (each.step, 30), (each.tokens, 2.5)
    seconds = sum(cost.of(LAYERS, PARAMETERS) * times for cost, times in costs)
    assert durations().verification(VerifyWork(7, 30, 2500), reference=False) == pytest.approx(seconds)
    assert durations().verification(VerifyWork(7, 30, 2500)) == pytest.approx(seconds + 14)


KINDS: dict[str, tuple[dict[str, Any], Plan]] = {
    "static": ({}, toy_plan()),
    "exact": ({"specialise": False}, toy_plan()),
    "exact, a past that a bucket made": (
        {"specialise": False},
        toy_plan([(2, 16, 0), (2, 64, 0)], [(1, 32), (2, 64)], Limits(64, 2, 128, 8)),
    ),
    "all": ({"verify": "all"}, toy_plan()),
    "one sequence": ({}, toy_plan([(1, 16, 0)], [(1, 15)], Limits(16, 1, 16, 8))),
    "portable": ({}, toy_plan([(1, 16, 0)], [(1, 15)], Limits(16, 1, 16, 8))),
    "beyond prompts": ({}, toy_plan(limits=Limits(32, 4, 64, 8, 12))),
    "far beyond prompts": ({}, toy_plan([(2, 16, 0)], [(2, 16), (2, 128)], Limits(128, 2, 32, 8, 16))),
    "longer": ({}, toy_plan([(1, 32, 0), (1, 64, 0), (2, 64, 0)], [(1, 32), (2, 64)], Limits(64, 2, 128, 8))),
}


@default_cases(3)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_counted_is_what_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Steps of ragged texts that end one by one are not counted to the last."""
    options, plan = KINDS[kind]
    steps: list[Step] = []
    target = FakeTarget(state="portable" if kind == "portable" else "native")
    use(monkeypatch, executor=watching(steps.append, "run", "run_each"), state=target.state)
    toy = Toy.make(tmp_path)
    built = toy.compile(plan, **options)
    configured = target.configure(CompileOptions.of("fake", **options))
    work = count(plan.buckets, plan.limits, target, configured, 2 * 8 * 257)
    assert work.executables == built.verification["executables"]
    assert work.steps == pytest.approx(len(steps), rel=0.15)
    assert work.tokens == pytest.approx(sum(s.token_ids.size for s in steps if s.phase == "prompt"), rel=0.25)


def test_a_store_teaches_what_models_of_the_same_size_take(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for index, (parameters, seconds) in enumerate(
        [(PARAMETERS, 50.0), (PARAMETERS, 70.0), (PARAMETERS, 60.0), (7, 1.0)]
    ):
        store.publish(Key("reference", {"n": index}), {}, {"parameters": parameters, "seconds": seconds})
    without = durations(store=store).verification(WORK, reference=False)
    assert durations(store=store).verification(WORK) - without == pytest.approx(60.0)
    assert durations(store=store, parameters=8).verification(WORK) < 60.0


def test_stages_say_how_large_their_model_is(tmp_path: Path) -> None:
    toy = Toy.make(tmp_path)
    toy.compile()
    sizes = {entry.meta["parameters"] for kind in ("weights", "reference") for entry in toy.store.entries(kind)}
    assert sizes == {2 * 8 * 257}


@pytest.fixture
def big(tmp_path: Path) -> str:
    path = tmp_path / "big.json"
    path.write_text(json.dumps(BIG))
    return str(path)


def opened(model: str, tmp_path: Path, device: str, limits: Limits, **options: object) -> Footprint:
    settings = Settings(cache_override=str(tmp_path / "none"))
    return Footprint.open(model, limits, device, settings, options=CompileOptions.of(device, **options))  # type: ignore[arg-type]


def test_what_is_beyond_an_hour_and_the_device_is_warned_of_with_what_shrinks_it(big: str, tmp_path: Path) -> None:
    limits = Limits(8192, 64)
    plan = make_plan(limits, "linear")
    time, memory = opened(big, tmp_path, "hpu", limits).warnings(plan.buckets, free=10**12)
    assert "minutes, above an hour; reduce it with: fewer buckets (--max-graphs" in time and "--jobs" in time
    assert "(graph memory 5" in memory and "above the 128.0 GB of a Gaudi 3; reduce it with: fewer buckets" in memory
    assert "--max-graph-memory" in memory and "--max-num-seqs" in memory and "--dtype bf16" in memory
    few = make_plan(Limits(256, 1), "linear")
    assert opened(big, tmp_path, "hpu", Limits(256, 1), verify="none").warnings(few.buckets, free=10**12) == []


def test_weights_that_the_disk_or_the_memory_does_not_hold(
    big: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(Limits(256, 1), "linear")
    monkeypatch.setattr("llmc.runtime.host.host_memory", lambda: 16 << 30)
    found = opened(big, tmp_path, "onnxruntime", Limits(256, 1), quantize="none", verify="none")
    memory, disk = found.warnings(plan.buckets, free=10**9)
    assert "above the 17.2 GB of this host; reduce it with: --quantize int8 or int4 or keep" in memory
    assert disk.startswith(
        "a bundle of 32.1 GB is above the 1.0 GB that the store's disk has free; reduce it with: --quan"
    )
    int8 = opened(big, tmp_path, "onnxruntime", Limits(256, 1), quantize="int8", verify="none", kernels="onnxruntime")
    assert all("--quantize" not in warning for warning in int8.warnings(plan.buckets, free=10**9))
    tpu = opened(big, tmp_path, "tpu:v5e-2x2", Limits(256, 1), verify="none").warnings(plan.buckets, free=10**12)
    shrinks = "--quantize int8 or fp8, --dtype bf16, --tensor-parallel"
    assert f"of 1 of the devices of v5e-2x2; reduce it with: {shrinks}" in tpu[0]
    assert (
        opened(big, tmp_path, "tpu:v5e-2x2", Limits(256, 1), dtype="bf16", tensor_parallel=4, verify="none").warnings(
            plan.buckets
        )
        == []
    )
