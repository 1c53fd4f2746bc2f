"""How long the shared parts of a compile take: learnt from the store where the model is as large, else by its size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmc.artifacts.key import Key
from llmc.artifacts.store import Store
from llmc.buckets.limits import Limits
from llmc.buckets.planner import make_plan
from llmc.compiler.durations import LAYERS, PARAMETERS, Cost, Durations
from llmc.compiler.footprint import Footprint
from llmc.compiler.model_size import ModelSize
from llmc.compiler.options import CompileOptions
from llmc.compiler.targets import open_target
from llmc.settings import Settings
from tests.toy import Toy

SMALL = ModelSize(LAYERS, 576, 1536, 9, 3, 64, 49152, tied=True)
PLAN = make_plan(Limits(256, 2), "linear")
BIG = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}  # fmt: skip


def durations(
    device: str = "hpu", parameters: int = PARAMETERS, store: Store | None = None, **options: str
) -> Durations:
    target = open_target(device)
    return Durations(target, target.configure(CompileOptions.of(device, **options)), SMALL, parameters, store)  # type: ignore[arg-type]


def test_costs_grow_with_what_they_are_of() -> None:
    cost = Cost(fixed=1, layers=10, parameters=100)
    assert cost.of(LAYERS, PARAMETERS) == 111
    assert cost.of(2 * LAYERS, PARAMETERS // 2) == 1 + 20 + 50


def test_verification_is_part_of_every_estimate_and_grows_with_the_model() -> None:
    small, large = (durations(parameters=n * PARAMETERS).verification(PLAN.buckets) for n in (1, 10))
    assert 20 < small < 100
    assert 5 * small < large < 10 * small
    assert durations(verify="none").verification(PLAN.buckets) == 0
    assert durations(verify="all").verification(PLAN.buckets) >= small
    assert small - durations().verification(PLAN.buckets, reference=False) == pytest.approx(14)


def test_every_executable_is_run_and_the_sampled_ones_twice() -> None:
    phases = [len(PLAN.prompt), len(PLAN.decode)]
    sampled = sum(min(4, count) for count in phases)
    assert durations().runs(PLAN.buckets) == 2 * sampled + sum(phases) - sampled
    assert durations("tpu:v5e-1x1").runs(PLAN.buckets) == 2 * sampled, "each would be compiled for this host first"
    assert durations("cpu").runs(PLAN.buckets) == 2 * sampled, "one executable runs them all"
    assert durations(verify="all").runs(PLAN.buckets) == 2 * sum(phases)


def test_a_store_teaches_what_models_of_the_same_size_take(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for place, (parameters, seconds) in enumerate(
        [(PARAMETERS, 50.0), (PARAMETERS, 70.0), (PARAMETERS, 60.0), (7, 1.0)]
    ):
        store.publish(Key("reference", {"n": place}), {}, {"parameters": parameters, "seconds": seconds})
    without = durations(store=store).verification(PLAN.buckets, reference=False)
    assert durations(store=store).verification(PLAN.buckets) - without == 60.0
    assert durations(store=store, parameters=8).verification(PLAN.buckets) < 60.0


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
    time, memory = opened(big, tmp_path, "hpu", limits).warnings(plan.buckets)
    assert "minutes, above an hour; what shrinks it: fewer buckets (--max-graphs" in time and "--jobs" in time
    assert "(graph memory 5" in memory and "above the 128.0 GB of a Gaudi 3; what shrinks it: fewer buckets" in memory
    assert "--max-graph-memory" in memory and "--max-num-seqs" in memory and "--dtype bf16" in memory
    few = make_plan(Limits(256, 1), "linear")
    assert opened(big, tmp_path, "hpu", Limits(256, 1), verify="none").warnings(few.buckets) == []


def test_weights_that_the_disk_or_the_memory_does_not_hold(
    big: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(Limits(256, 1), "linear")
    monkeypatch.setattr("llmc.runtime.host.host_memory", lambda: 16 << 30)
    found = opened(big, tmp_path, "onnxruntime", Limits(256, 1), quantize="none", verify="none")
    memory, disk = found.warnings(plan.buckets, free=10**9)
    assert "above the 17.2 GB of this host; what shrinks it: --quantize int8 or int4 or keep" in memory
    assert disk.startswith(
        "a bundle of 32.1 GB is above the 1.0 GB that the store's disk has free; what shrinks it: --quan"
    )
    int8 = opened(big, tmp_path, "onnxruntime", Limits(256, 1), quantize="int8", verify="none", kernels="onnxruntime")
    assert all("--quantize" not in warning for warning in int8.warnings(plan.buckets, free=10**9))
    tpu = opened(big, tmp_path, "tpu:v5e-2x2", Limits(256, 1), verify="none").warnings(plan.buckets)
    assert "of 1 of the devices of v5e-2x2; what shrinks it: --dtype bf16, --tensor-parallel" in tpu[0]
    assert (
        opened(big, tmp_path, "tpu:v5e-2x2", Limits(256, 1), dtype="bf16", tensor_parallel=4, verify="none").warnings(
            plan.buckets
        )
        == []
    )
