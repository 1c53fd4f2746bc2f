"""Which engine `--device cpu` stands for: by measurements, the host and the user's limits, and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmc.artifacts.store import Store
from llmc.compiler import cpu_choice
from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.cpu_choice import KEPT, OWN, Measured, Wanted, choose, engine_for, measurements
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline import compile_bundle
from llmc.errors import InputError
from llmc.runtime.bundle import Bundle
from llmc.runtime.host import cpu_features
from tests.compiler import tiny
from tests.toy import toy_plan

BOTH = ("onnxruntime", "openvino")
ISA = ("avx512f", "x86_64")


def one(decode: dict[int, float], prefill: float, start: float, memory: int) -> dict[str, Any]:
    return {"decode_ms": decode, "prefill_ms": {512: prefill}, "start_s": start, "memory_bytes": memory}


def measured(**changed: Any) -> Measured:
    engines = {
        "onnxruntime": {"int8": one({1: 5, 4: 9, 8: 16, 16: 30}, 500, 0.3, 300_000_000)},
        "openvino": {"int8": one({1: 7, 4: 9.1, 8: 11, 16: 18}, 160, 0.8, 450_000_000)},
    }
    return Measured(**{
        "source": "here", "machine": "a CPU", "isa": frozenset(ISA), "parameters": 100, "engines": engines, **changed
    })  # fmt: skip


@pytest.mark.parametrize(
    ("batch", "engine"), [(1, "onnxruntime"), (4, "onnxruntime"), (6, "openvino"), (8, "openvino"), (64, "openvino")]
)
def test_the_faster_decode_step_at_the_plans_batch_wins_and_a_tie_goes_to_what_opens_sooner(
    batch: int, engine: str
) -> None:
    choice = choose(Wanted(batch), measured(), ISA, BOTH, 100)
    assert choice.engine == engine
    assert f"a decode step of {batch} measured: onnxruntime" in choice.why


def test_long_prompts_of_traffic_weigh_in() -> None:
    assert choose(Wanted(1, prompt_tokens=10, new_tokens=200), measured(), ISA, BOTH, 100).engine == "onnxruntime"
    choice = choose(Wanted(1, prompt_tokens=1000, new_tokens=200), measured(), ISA, BOTH, 100)
    assert (choice.engine, choice.why[:14]) == ("openvino", "a mean request")


def test_the_users_limits_rule_engines_out_scaled_by_the_models_size() -> None:
    choice = choose(Wanted(8, max_start=0.5), measured(), ISA, BOTH, 100)
    assert choice.engine == "onnxruntime"
    assert "openvino would not keep the limits" in choice.why
    assert choose(Wanted(8, max_memory=500_000_000), measured(), ISA, BOTH, 100).engine == "openvino"
    assert choose(Wanted(8, max_memory=500_000_000), measured(), ISA, BOTH, 150).engine == "onnxruntime"
    with pytest.raises(InputError, match=r"no engine keeps the limits: onnxruntime takes about 300 MB and 0\.30 s"):
        choose(Wanted(8, max_memory=1), measured(), ISA, BOTH, 100)


def test_what_was_not_measured_or_is_not_there_is_said() -> None:
    choice = choose(Wanted(8), measured(), ("x86_64",), BOTH, 100)
    assert (choice.engine, choice.why) == (
        "onnxruntime", "nothing was measured for a CPU without avx512f: `llmc bench cpu` does"
    )  # fmt: skip
    assert choose(Wanted(8), measured(), ISA, ("onnxruntime",), 100).why == "openvino is not installed"
    assert "int4 was measured for no engine only" in choose(Wanted(8, "int4"), measured(), ISA, BOTH, 100).why
    assert choose(Wanted(8, dtype="bf16"), measured(), ISA, BOTH, 100).engine == "openvino"


def test_the_measurements_kept_with_the_code_are_sound() -> None:
    kept = Measured.load(KEPT)
    assert set(kept.engines) == set(BOTH)
    for engine in BOTH:
        assert set(kept.engines[engine]["int8"]["decode_ms"]) == {1, 4, 8, 16}


def test_the_users_own_measurements_win_and_damaged_ones_are_named(tmp_path: Path) -> None:
    assert measurements(tmp_path).source == str(KEPT)
    own = tmp_path / OWN
    own.parent.mkdir()
    own.write_text(KEPT.read_text())
    assert measurements(tmp_path).source == str(own)
    own.write_text(json.dumps({"schema": 2}))
    with pytest.raises(
        InputError, match=r"cpu\.json: not a file of measurements \(schema 2\); make one with `llmc bench"
    ):
        measurements(tmp_path)


@pytest.fixture
def favours(monkeypatch: pytest.MonkeyPatch) -> Any:
    def favour(engine: str) -> None:
        fast, slow = one({1: 1, 16: 1}, 1, 0.1, 1), one({1: 9, 16: 9}, 9, 0.1, 1)
        engines = {e: {"int8": fast if e == engine else slow} for e in BOTH}
        found = measured(isa=frozenset(cpu_features()), engines=engines)
        monkeypatch.setattr(cpu_choice, "measurements", lambda _: found)

    return favour


@pytest.mark.parametrize("engine", BOTH)
def test_a_bundle_for_cpu_is_for_the_engine_that_was_chosen_and_says_why(
    engine: str, favours: Any, tmp_path: Path
) -> None:
    favours(engine)
    model = tiny.write_model(tmp_path / "llama", "llama")
    options = CompileOptions("cpu", "int8", verify="none", max_start=10**9)
    result = compile_bundle(str(model), tmp_path / "bundle", toy_plan(), options, Store(tmp_path / "s"), lambda _: None)
    manifest = Bundle.open(tmp_path / "bundle").manifest
    assert manifest.device == "cpu"
    assert manifest.executor.removesuffix("-llmc") == engine
    assert f"{engine}: a decode step of" in result.choice
    assert manifest.options["choice"] == result.choice
    named = CompileOptions(engine, "int8", verify="none")
    again = compile_bundle(str(model), tmp_path / "again", toy_plan(), named, Store(tmp_path / "s"), lambda _: None)
    assert again.built == 0, "the same executables, whoever chose them"


@pytest.mark.parametrize(("option", "engine"), [("kernels", "onnxruntime"), ("group_size", "openvino")])
def test_an_option_of_one_engine_decides_for_it(option: str, engine: str, favours: Any, tmp_path: Path) -> None:
    favours("openvino" if engine == "onnxruntime" else "onnxruntime")
    checkpoint = open_checkpoint(tiny.write_model(tmp_path / "llama", "llama"))
    given: Any = {"kernels": "onnxruntime", "group_size": 64}[option]
    target, _, why = engine_for(CompileOptions("cpu", **{option: given}), toy_plan(), checkpoint)
    assert target.executor == engine
    assert why == f"only {engine} takes --{option.replace('_', '-')}"


def test_limits_with_an_engine_named_are_refused(tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "llama", "llama")
    options = CompileOptions("onnxruntime", "int8", max_memory=1)
    with pytest.raises(InputError, match="--max-memory chooses what --device cpu stands for; leave it out for onnx"):
        compile_bundle(str(model), tmp_path / "b", toy_plan(), options, Store(tmp_path / "s"), lambda _: None)
