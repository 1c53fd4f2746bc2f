"""Which engine `--device cpu` stands for: by measurements, the host and the user's limits, and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmc.artifacts.bundle.kernel_sets import KERNEL_SETS
from llmc.artifacts.store.store import Store
from llmc.compiler.architectures.shared.size import Weights
from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.checkpoint.gguf_file import BLOCK_TYPES
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import compile_bundle
from llmc.compiler.pipeline.resolve import CompileJob
from llmc.compiler.targets import cpu as cpu_target
from llmc.compiler.targets.cpu import (
    KEPT,
    OWN,
    SIZES,
    CpuCase,
    EngineChoice,
    Measured,
    Wanted,
    added,
    configured,
    load,
    measurements,
)
from llmc.errors import InputError
from llmc.runtime.bundle import Bundle
from llmc.runtime.host import cpu_features
from llmc.settings import Settings
from llmc.testing.toy import toy_plan
from tests.compiler import tiny

BOTH = ("onnxruntime", "openvino")
ISA = ("avx512f", "x86_64")
PARAMETERS = 100_000
"""About those of the tiny models."""


VERSIONS = {"onnxruntime": "1", "openvino": "2"}
OPTIONS = {
    "onnxruntime": {"kernels": "llmc", "dtype": "f32", "specialise": False},
    "openvino": {"kernels": None, "dtype": "bf16", "specialise": False},
}


def one(engine: str, decode: dict[int, float], prefill: float, start: float, memory: int) -> dict[str, Any]:
    figures = {"decode_ms": decode, "prefill_ms": {512: prefill}, "start_s": start, "memory_bytes": memory}
    return {"options": OPTIONS[engine], **figures}


def measured(**changed: Any) -> Measured:
    engines = {
        "onnxruntime": {"int8": one("onnxruntime", {1: 5, 4: 9, 8: 16, 16: 30}, 500, 0.3, 300_000_000)},
        "openvino": {"int8": one("openvino", {1: 7, 4: 9.1, 8: 11, 16: 18}, 160, 0.8, 450_000_000)},
    }
    return Measured(**{
        "machine": "a CPU", "isa": frozenset(ISA), "threads": 2, "model": "a model", "model_type": "llama",
        "parameters": 100, "versions": VERSIONS, "engines": engines, **changed
    })  # fmt: skip


def choose(wanted: Wanted, *records: Measured, **changed: Any) -> EngineChoice:
    case = CpuCase(**{
        "isa": ISA, "threads": 2, "model_type": "llama", "parameters": 100, "versions": VERSIONS, "options": OPTIONS,
        **changed,
    })  # fmt: skip
    return cpu_target.choose(wanted, records or [measured()], case)


@pytest.mark.parametrize(
    ("batch", "engine"), [(1, "onnxruntime"), (4, "onnxruntime"), (6, "openvino"), (8, "openvino"), (64, "openvino")]
)
def test_the_faster_decode_step_at_the_plans_batch_wins_and_a_tie_goes_to_what_opens_sooner(
    batch: int, engine: str
) -> None:
    choice = choose(Wanted(batch))
    assert choice.engine == engine
    assert f"a decode step of {batch} in int8 measured: onnxruntime with llmc's kernels" in choice.why


def test_long_prompts_of_traffic_weigh_in() -> None:
    assert choose(Wanted(1, prompt_tokens=10, new_tokens=200)).engine == "onnxruntime"
    choice = choose(Wanted(1, prompt_tokens=1000, new_tokens=200))
    assert (choice.engine, choice.why[:14]) == ("openvino", "a mean request")


def test_the_users_limits_rule_engines_out_scaled_by_the_models_size() -> None:
    choice = choose(Wanted(8, max_start=0.5))
    assert choice.engine == "onnxruntime"
    assert "openvino would not keep the limits" in choice.why
    assert choose(Wanted(8, max_memory=500_000_000)).engine == "openvino"
    assert choose(Wanted(8, max_memory=500_000_000), parameters=150).engine == "onnxruntime"
    with pytest.raises(InputError, match=r"no engine keeps the limits: onnxruntime takes about 300 MB and 0\.30 s"):
        choose(Wanted(8, max_memory=1))


def test_an_engine_that_is_alone_or_the_only_one_that_offers_something_is_taken() -> None:
    alone = {"onnxruntime": OPTIONS["onnxruntime"]}
    assert choose(Wanted(8), options=alone).why == "openvino is not installed"
    assert choose(Wanted(8, dtype="bf16")).engine == "openvino"


@pytest.mark.parametrize(
    ("changed", "quantize", "why"),
    [
        ({"isa": ("x86_64",)}, None, "on a CPU with avx512f"),
        ({"threads": 4}, None, "with 2 threads, not 4"),
        ({"model_type": "qwen3"}, None, "for llama, not qwen3"),
        ({"parameters": 100 * SIZES + 1}, None, "for 0.0001 M parameters, not 0.000401 M"),
        ({"parameters": 100 / SIZES - 1}, None, "for 0.0001 M parameters, not 2.4e-05 M"),
        ({"versions": {**VERSIONS, "openvino": "3"}}, None, "with openvino 2, not 3"),
        ({}, "keep", "without onnxruntime keep"),
        ({"options": OPTIONS | {"openvino": {"dtype": "f32"}}}, None, "for openvino with dtype bf16, not f32"),
        ({"options": OPTIONS | {"openvino": {"specialise": 1}}}, None, "for openvino with specialise False, not 1"),
        ({"options": OPTIONS | {"onnxruntime": {"kernels": 0}}}, None, "for onnxruntime with kernels llmc, not 0"),
    ],
)  # fmt: skip
def test_a_measurement_that_does_not_hold_decides_nothing_and_the_reason_is_said(
    changed: Any, quantize: str | None, why: str
) -> None:
    choice = choose(Wanted(8, quantize), **changed)
    assert choice.engine == "onnxruntime", "which opens sooner"
    assert f"(a model was measured {why}): run `llmc bench cpu MODEL`" in choice.why


KEPT_HERE = OPTIONS | {"onnxruntime": {"quantize": "keep", **OPTIONS["onnxruntime"]}}


def test_an_engine_is_compared_in_its_own_default_or_else_all_in_int8() -> None:
    """By int8 OpenVINO's steps of 8 are faster (11 ms to 16)."""
    plain = measured()
    kept = {"keep": one("onnxruntime", {1: 4, 16: 12}, 500, 0.3, 200_000_000)}
    both = measured(engines=plain.engines | {"onnxruntime": {**plain.engines["onnxruntime"], **kept}})
    choice = choose(Wanted(8), both, options=KEPT_HERE)
    assert choice.engine == "onnxruntime"
    assert "in keep (onnxruntime) and int8 (openvino) measured: onnxruntime with llmc's kernels 7.7 ms" in choice.why
    unmeasured = choose(Wanted(8), plain, options=KEPT_HERE)
    assert (unmeasured.engine, "in int8 measured" in unmeasured.why) == ("openvino", True)
    assert choose(Wanted(8, "int8"), both, options=OPTIONS).engine == "openvino"


def test_the_first_record_that_holds_decides() -> None:
    other = measured(threads=4, model="with four threads")
    slow = measured(machine="another CPU", isa=frozenset({"sve"}))
    choice = choose(Wanted(8), slow, other, measured(machine="this CPU"))
    assert (choice.engine, "this CPU" in choice.why) == ("openvino", True)
    assert choose(Wanted(8), slow, other, measured(), threads=4).why.count("four") == 0
    scaled = choose(Wanted(8), parameters=200).why
    assert "openvino 22.0 ms (a CPU, scaled from a model)" in scaled


def test_the_measurements_kept_with_the_code_are_sound() -> None:
    assert ["avx512f" in kept.isa for kept in load(KEPT)] == [True, False], "of a CPU with AVX-512 and of one with AVX2"
    for kept in load(KEPT):
        assert set(kept.engines) == set(BOTH)
        for engine in BOTH:
            assert set(kept.engines[engine]["int8"]["decode_ms"]) == {1, 4, 8, 16}
            assert set(kept.engines[engine]["int8"]["options"]) == set(OPTIONS[engine])


def test_options_are_those_that_a_compile_would_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmc.compiler.targets.onnxruntime.target.cpu_features", lambda: KERNEL_SETS[0].isa)
    plain = CompileOptions("cpu")
    assert configured("onnxruntime", plain) == {
        "quantize": "int8", "kernels": "llmc", "dtype": "f32", "specialise": False
    }  # fmt: skip
    blocks = [Weights(1, BLOCK_TYPES["Q4_0"].form)]
    assert configured("onnxruntime", plain, blocks)["quantize"] == "keep"
    assert configured("openvino", plain, blocks)["quantize"] == "int8"
    assert configured("onnxruntime", CompileOptions("cpu", specialise=True))["kernels"] is None
    assert configured("onnxruntime", CompileOptions("cpu", "none"))["kernels"] is None
    assert configured("onnxruntime", CompileOptions("cpu", dtype="bf16")) == {}


def test_the_users_own_measurements_come_first_and_damaged_ones_are_named(tmp_path: Path) -> None:
    assert measurements(tmp_path) == load(KEPT)
    own = tmp_path / OWN
    own.parent.mkdir()
    record = json.loads(KEPT.read_text())["measured"][0] | {"machine": "mine"}
    own.write_text(json.dumps(added(own, record)))
    assert [one.machine for one in measurements(tmp_path)] == ["mine", *(kept.machine for kept in load(KEPT))]
    own.write_text(json.dumps({"schema": 1}))
    with pytest.raises(
        InputError, match=r"cpu\.json: not a file of measurements \(schema 1\); make one with `llmc bench"
    ):
        measurements(tmp_path)


def test_what_is_measured_again_replaces_its_like_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "cpu.json"
    record = json.loads(KEPT.read_text())["measured"][0]
    for changed in ({"threads": 8}, {"parameters": 5}, {"machine": "later"}, {"threads": 8, "machine": "last"}):
        file.write_text(json.dumps(added(file, record | changed)))
    assert [(one.machine, one.threads, one.parameters) for one in load(file)] == [
        ("last", 8, record["parameters"]), ("later", 2, record["parameters"]), (record["machine"], 2, 5),
    ]  # fmt: skip


@pytest.fixture
def favours(monkeypatch: pytest.MonkeyPatch) -> Any:
    def favour(engine: str) -> None:
        fast, slow = ({1: 1, 16: 1}, 1, 0.1, 1), ({1: 9, 16: 9}, 9, 0.1, 1)
        engines = {
            e: {"int8": one(e, *(fast if e == engine else slow)) | {"options": configured(e, CompileOptions(e))}}
            for e in BOTH
        }
        found = measured(
            isa=frozenset(cpu_features()), engines=engines, threads=Settings.from_environment().threads,
            parameters=PARAMETERS, versions=cpu_target.versions(BOTH),
        )  # fmt: skip
        monkeypatch.setattr(cpu_target, "measurements", lambda _: [found])

    return favour


@pytest.mark.parametrize("engine", BOTH)
def test_a_bundle_for_cpu_is_for_the_engine_that_was_chosen_and_says_why(
    engine: str, favours: Any, tmp_path: Path
) -> None:
    favours(engine)
    model = tiny.write_model(tmp_path / "llama", "llama")
    options = CompileOptions.of("cpu", quantize="int8", verify="none", max_start=10**9)
    result = compile_bundle(str(model), tmp_path / "bundle", toy_plan(), options, Store(tmp_path / "s"), lambda _: None)
    manifest = Bundle.open(tmp_path / "bundle").manifest
    assert manifest.device == "cpu"
    assert manifest.executor.removesuffix("-llmc") == engine
    assert f"{engine}: a decode step of" in result.choice
    assert manifest.options["choice"] == result.choice
    named = CompileOptions(engine, "int8", verify="none")
    again = compile_bundle(str(model), tmp_path / "again", toy_plan(), named, Store(tmp_path / "s"), lambda _: None)
    assert again.built == 0, "the same executables, whoever chose them"


@pytest.mark.parametrize(
    ("option", "given", "engine"),
    [
        ("kernels", "onnxruntime", "onnxruntime"),
        ("group_size", 16, "onnxruntime"),
        ("group_size", 0, "openvino"),
        ("activation_group_size", 32, "openvino"),
    ],
)
def test_an_option_that_one_engine_offers_decides_for_it(
    option: str, given: Any, engine: str, favours: Any, tmp_path: Path
) -> None:
    favours("openvino" if engine == "onnxruntime" else "onnxruntime")
    checkpoint = open_checkpoint(tiny.write_model(tmp_path / "llama", "llama"))
    job = CompileJob.of(checkpoint, toy_plan(), CompileOptions.of("cpu", **{option: given}))
    assert job.target.description.executor == engine
    assert job.why == f"only {engine} takes --{option.replace('_', '-')}"


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_an_option_that_both_engines_offer_leaves_the_choice(engine: str, favours: Any, tmp_path: Path) -> None:
    favours(engine)
    checkpoint = open_checkpoint(tiny.write_model(tmp_path / "llama", "llama"))
    job = CompileJob.of(checkpoint, toy_plan(), CompileOptions.of("cpu", quantize="int8", group_size=64))
    assert job.target.description.executor.removesuffix("-llmc") == engine
    assert job.why.startswith("a decode step of")
    assert job.options.get("group_size") == 64


def test_a_value_that_no_engine_offers_is_an_error(favours: Any, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny.write_model(tmp_path / "llama", "llama"))
    with pytest.raises(InputError, match="--group-size 17 must be one of 16, 32, 64, 128, 256"):
        CompileJob.of(checkpoint, toy_plan(), CompileOptions.of("cpu", group_size=17))
    with pytest.raises(InputError, match="openvino does not offer int4 in groups of 16"):
        CompileJob.of(checkpoint, toy_plan(), CompileOptions.of("cpu", quantize="int4", group_size=16, starter=True))


@pytest.mark.parametrize("default", [{"starter": False}, {"tensor_parallel": 1, "lowering": "jax", "starter": False}])
def test_a_default_that_is_written_out_chooses_nothing(tmp_path: Path, default: dict[str, Any]) -> None:
    """As --no-starter does, and the note of an interrupted compile did."""
    checkpoint = open_checkpoint(str(tiny.write_model(tmp_path / "llama", "llama")))
    plain = CompileJob.of(checkpoint, toy_plan(), CompileOptions("cpu"))
    found = CompileJob.of(checkpoint, toy_plan(), CompileOptions.of("cpu", **default))
    assert (type(found.target), found.why) == (type(plain.target), plain.why)
    assert found.options == plain.options


def test_limits_with_an_engine_named_are_refused(tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "llama", "llama")
    options = CompileOptions.of("onnxruntime", quantize="int8", max_memory=1)
    with pytest.raises(InputError, match="--max-memory is for cpu; leave it out for onnxruntime"):
        compile_bundle(str(model), tmp_path / "b", toy_plan(), options, Store(tmp_path / "s"), lambda _: None)
