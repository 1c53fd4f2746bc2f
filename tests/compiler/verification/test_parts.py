"""What verification runs of a plan, what it leaves out for its budget, and that the words say exactly that."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from llmc.artifacts.bundle.manifest import read_manifest
from llmc.buckets.bucket import PHASES, Bucket
from llmc.buckets.limits import Limits
from llmc.buckets.planner.planner import make_plan
from llmc.cli.results import verified_line
from llmc.compiler.options import CompileOptions
from llmc.compiler.targets import open_target
from llmc.compiler.targets.base import Shape
from llmc.compiler.verification import parts as module
from llmc.compiler.verification.limits import VerificationPolicy
from llmc.compiler.verification.parts import (
    BUDGET,
    CHEAP,
    ChosenParts,
    Once,
    bucket_of,
    choose,
    operations,
    steps_beyond,
)
from llmc.errors import VerificationError
from llmc.testing.toy import DECODE, PROMPT
from tests.devices import use, watching, wrong_for
from tests.tiers import default_cases
from tests.toy import Toy

SMALL, LARGE = 135_000_000, 8_000_000_000
LIMITS = Limits(1024, 4)
MANY = make_plan(LIMITS, "linear").buckets


def chosen(
    buckets: tuple[Bucket, ...] = MANY, parameters: int = SMALL, device: str = "onnxruntime", every: bool = False
) -> ChosenParts:
    return choose(buckets, LIMITS, every, *specialised(device, buckets), parameters)


def specialised(device: str, buckets: tuple[Bucket, ...]) -> tuple[VerificationPolicy, list[Shape]]:
    target = open_target(device)
    return target.verification, target.shapes(
        buckets, target.configure(CompileOptions(device, "none", specialise=True))
    )


def twice(found: ChosenParts) -> set[Bucket]:
    return {part for part in found.parts if isinstance(part, Bucket)}


def once(found: ChosenParts) -> set[Bucket]:
    return {part.bucket for part in found.parts if isinstance(part, Once)}


# What is chosen


@pytest.mark.parametrize("parameters", [SMALL, LARGE, 0])
def test_every_executable_is_run_whatever_the_budget(parameters: int) -> None:
    found = chosen(parameters=parameters)
    assert twice(found) | once(found) == set(MANY) and not twice(found) & once(found)
    assert found.parts[0] == "greedy" and found.parts[-1] == "accuracy" and len(found.parts) == len(MANY) + 2
    assert found.planned == len(MANY)


def test_beyond_the_budget_no_bucket_is_run_whose_executable_others_run() -> None:
    target = open_target("openvino")
    shapes = target.shapes(MANY, target.configure(CompileOptions("openvino", "none")))
    small, large = (
        choose(MANY, LIMITS, False, target.verification, shapes, parameters) for parameters in (SMALL, LARGE)
    )
    assert len(twice(small)) == 8 and small.not_run == small.left_out == ()
    phases = [
        sorted((b for b in MANY if b.phase == phase), key=lambda b: b.tokens * (1 + b.context)) for phase in PHASES
    ]
    assert {end for order in phases for end in (order[0], order[-1])} <= twice(large) | once(large)
    assert large.not_run and set(large.not_run) == set(map(str, twice(small) - twice(large) - once(large)))
    assert set(large.left_out) == set(map(str, once(large)))


def test_second_runs_are_those_that_fit_into_what_is_left() -> None:
    small, large = chosen(), chosen(parameters=LARGE)
    assert len(twice(small)) == 8 and small.left_out == ()
    smallest = {min(b for b in MANY if b.phase == phase) for phase in ("prompt", "decode")}
    assert {b for b in twice(large) if b.phase == "prompt"} == {min(smallest, key=lambda b: b.phase != "prompt")}
    cheap = sum(operations(bucket, LARGE) for bucket in twice(large) - smallest)
    assert 0 < cheap <= BUDGET * CHEAP, "running each once is beyond the budget by itself"
    assert set(large.left_out) == {str(bucket) for bucket in twice(small) - twice(large)} and not large.not_run
    between = chosen(parameters=SMALL * 13 // 10)
    spent = sum(operations(b, SMALL * 13 // 10) for part in between.parts[1:-1] for b in [bucket_of(part)])
    spent += sum(operations(bucket, SMALL * 13 // 10) for bucket in twice(between))
    assert smallest < twice(between) < twice(small) and spent <= BUDGET * (1 + CHEAP)
    assert set(between.left_out) == {str(bucket) for bucket in twice(small) - twice(between)}


def test_steps_beyond_the_longest_prompt_are_part_of_the_budget() -> None:
    parameters, far = SMALL * 11 // 10, Limits(1024, 4, None, 128, 256)
    within, beyond = (
        sum(operations(bucket_of(part), parameters) * (2 - isinstance(part, Once)) for part in found.parts[1:-1])
        for limits in (LIMITS, far)
        for found in [choose(MANY, limits, False, *specialised("onnxruntime", MANY), parameters)]
    )
    steps = steps_beyond(far, parameters) * 2 * parameters * module.LEAST
    assert within <= BUDGET < within + steps and beyond + steps <= BUDGET


def test_all_is_all_whatever_it_takes() -> None:
    found = chosen(parameters=LARGE, every=True)
    assert twice(found) == set(MANY) and found.left_out == ()


def test_the_choice_is_the_same_every_time_and_a_bucket_more_changes_little() -> None:
    assert chosen() == chosen()
    more = (*MANY, Bucket("decode", 3, 1, 512))
    assert len(set(map(str, chosen(more).parts)) ^ set(map(str, chosen().parts))) <= 5


def test_an_executable_that_takes_a_bucket_row_by_row_is_run_for_one_row() -> None:
    """ONNX Runtime's executables of prompts over a past have one row: a bucket of eight runs one eight times."""
    sizes = [("prompt", batch, query, 256) for batch in (1, 2, 8) for query in (16, 32, 64, 128, 256, 512)]
    buckets = tuple(Bucket(*size) for size in [*sizes, ("prompt", 8, 512, 0), ("decode", 8, 1, 512)])  # type: ignore[arg-type]
    found = chosen(buckets)
    continued = [bucket for bucket in once(found) if bucket.phase == "prompt" and bucket.context]
    assert continued and {bucket.batch for bucket in continued} == {1}
    ran = {bucket.query for bucket in twice(found) | once(found) if bucket.context == 256}
    assert ran == {16, 32, 64, 128, 256, 512}


def test_what_is_compiled_for_the_check_alone_is_sampled() -> None:
    found = chosen(device="tpu:v5e-1x1")
    assert len(found.parts) == 2 + 8 and not once(found)
    assert len(chosen(parameters=LARGE, device="tpu:v5e-1x1").parts) == 2 + 8, "those left out are run once"


# What is run


def runs(toy: Toy, patch: pytest.MonkeyPatch, **options: Any) -> Counter[tuple[str, int, int, int]]:
    """How often each shape of step was run by the buckets of a verification."""
    seen: list[tuple[str, int, int, int]] = []
    patch.setattr("llmc.compiler.verification.verify.Verification.greedy", lambda self: {"sequences": 0})
    patch.setattr("llmc.compiler.verification.verify.Verification.accuracy", lambda self: {})
    patch.setattr("llmc.compiler.verification.verify.Verification._past_length", lambda self, bucket: 0)
    use(patch, executor=watching(lambda step: seen.append((step.phase, step.batch, step.query, step.context))))
    toy.compile(**options)
    return Counter(seen)


def test_steps_are_as_many_as_were_chosen(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that continue are left out here: they would take a past, of other steps."""
    begin = {("prompt", *sizes) for sizes in PROMPT if sizes[2] == 0}
    found = runs(toy, monkeypatch, verify="all")
    assert {shape: found[shape] for shape in begin} == dict.fromkeys(begin, 2)


def test_beyond_the_budget_steps_are_run_once(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUDGET", 0.0)
    begin = {("prompt", *sizes) for sizes in PROMPT if sizes[2] == 0}
    found = runs(toy, monkeypatch)
    assert {shape: found[shape] for shape in begin} == {shape: 1 + (shape == min(begin)) for shape in begin}


@default_cases(3)
@pytest.mark.parametrize(
    ("phase", "batch", "query", "context"), [("prompt", *p) for p in PROMPT] + [("decode", b, 1, c) for b, c in DECODE]
)
def test_one_wrong_executable_among_many_is_found_without_any_budget(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, phase: str, batch: int, query: int, context: int
) -> None:
    monkeypatch.setattr(module, "BUDGET", 0.0)
    use(monkeypatch, compiling=wrong_for(phase, batch, query, context))
    with pytest.raises(VerificationError, match=rf"{phase}\[{batch}x{query}\+{context}\]"):
        toy.compile()


# What is said of it


def test_the_manifest_and_the_words_say_what_was_run_and_what_was_left_out(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    buckets = len(toy.plan.buckets)
    found = toy.compile().verification
    assert (found["planned"], found["left_out"]) == (buckets, [])
    assert f": all 11 executables run, 11 buckets ({found['twice']} with two NaN fills), " in verified_line(found, 11)
    monkeypatch.setattr(module, "BUDGET", 0.0)
    cut = toy.compile().verification
    assert cut["twice"] == 2 and len(cut["left_out"]) == found["twice"] - 2
    assert cut == read_manifest(toy.bundle).verification
    names = ", ".join(cut["left_out"])
    words = f"(2 with two NaN fills, {len(cut['left_out'])} sampled ones with one to keep within the budget: {names}), "
    assert words in verified_line(cut, 11)
    short = {**cut, "shortened": {"text": {"tokens": 256, "of": 512}}}
    assert verified_line(short, 11).endswith("; to keep within the budget 256 of 512 tokens of text")
    assert cut["shortened"] == {} and verified_line(cut, 11).endswith("padding leak 0")
    everything = toy.compile(verify="all").verification
    assert everything["left_out"] == [] and everything["twice"] == buckets


def test_where_one_executable_runs_all_buckets_the_words_say_how_many_were_run(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = toy.compile(specialise=False).verification
    assert found["buckets"] == found["twice"] == 8 and found["planned"] == 11
    assert "toy: 1 executable run, 8 of 11 buckets (8 with two NaN fills), " in verified_line(found, 1)
    monkeypatch.setattr(module, "BUDGET", 0.0)
    cut = toy.compile(specialise=False).verification
    assert cut["buckets"] == 4 and len(cut["left_out"]) == 2 and len(cut["not_run"]) == 4
    words = f"4 not run to keep within it, others run their executables: {', '.join(cut['not_run'])})"
    assert words in verified_line(cut, 1)
    assert " 1 of 11 executables run, " in verified_line(found, 11)
