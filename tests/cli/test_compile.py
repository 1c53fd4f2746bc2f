"""`llmc compile`: what it prints, reuses, refuses, estimates, and goes on with."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from llmc.artifacts.bundle.manifest import read_manifest
from llmc.artifacts.store.store import Store
from llmc.buckets.plan import Plan
from llmc.compiler.architectures import supported
from llmc.compiler.targets.base import Lowered, Shape
from llmc.testing.toy import toy_plan, write_toy
from tests.artifacts.helpers import child, files_below
from tests.cli.helpers import Llmc, Ran
from tests.compiler import tiny
from tests.devices import negated, use

LIMITS = ("--max-model-len", 32, "--max-num-seqs", 4)
BUCKETS = 6


@pytest.fixture
def compile_(llmc: Llmc, toy: Path) -> Llmc:
    """`llmc compile` of the toy for the fake device, into `bundle` unless told otherwise."""

    def run(*arguments: object, model: object = toy) -> Ran:
        location = () if {"-o", "--output"} & set(arguments) else ("-o", "bundle")
        plan = () if {"--plan", "--max-model-len"} & set(arguments) else LIMITS
        return llmc("compile", model, "--device", "fake", *plan, *location, *arguments)

    return run


# What is said


def test_the_outcome_is_reported_in_words(compile_: Llmc) -> None:
    ran = compile_()
    assert ran.code == 0
    first, second, third, fourth = ran.out.splitlines()
    assert first == f"bundle: {BUCKETS} executables (one executable per bucket)"
    assert second.startswith(f"built {BUCKETS}, from the store 0; native {BUCKETS}, portable 0; ")
    assert third.startswith("verified against toy: all 6 executables run, 6 buckets (") and "padding leak 0" in third
    assert fourth.startswith("accuracy over ") and "nats (limit 1e-05 for exact), p99 " in fourth
    found = re.search(r"top-1 agreement 100.0%, perplexity ([\d,.]+) \(reference ([\d,.]+)\)$", fourth)
    assert found is not None
    assert float(found[1].replace(",", "")) == pytest.approx(float(found[2].replace(",", "")), rel=1e-4)
    again = compile_().out.splitlines()
    assert again[1].startswith(f"built 0, from the store {BUCKETS}; ")
    assert "not verified (--verify none)" in compile_("--verify", "none").out


def test_top_logits_are_reported_and_explained(compile_: Llmc, llmc: Llmc) -> None:
    assert "largest logits" not in compile_().out
    topped = compile_("--sample-top-k", 64, "-o", "topped")
    assert topped.out.splitlines()[2] == "graphs also return the 64 largest logits with their ids"
    assert compile_("--sample-top-k", 64, "--json").json["sample_top_k"] == 64
    assert read_manifest(Path("topped")).options["sample_top_k"] == 64
    assert "--sample-top-k" in llmc("compile", "--help").out
    compile_("-o", "plain")
    explained = llmc("cache", "explain", "plain", "topped").out.splitlines()
    assert explained[0].startswith("options.sample_top_k: ") and explained[0].endswith(" → 64")


def test_progress_is_lines_on_standard_error_only(compile_: Llmc) -> None:
    ran = compile_()
    assert [f"[{i}/{BUCKETS}]" in ran.err for i in range(1, BUCKETS + 1)] == [True] * BUCKETS
    assert "prompt batch=4 query=32 context=0: native, 0.00 MB, " in ran.err
    assert "weights: " in ran.err and "reference model: " in ran.err
    assert "\x1b" not in ran.err and "\r" not in ran.err, "no terminal, no bar"
    assert "[1/" not in ran.out
    again = compile_()
    assert again.err.count(", cached") == BUCKETS
    assert "weights: from the store" in again.err


def test_q_leaves_the_outcome_and_no_progress(compile_: Llmc) -> None:
    ran = compile_("-q")
    assert ran.err == ""
    assert ran.out.startswith("bundle: ")


def test_json_is_one_document_with_the_counts(compile_: Llmc) -> None:
    ran = compile_("--json")
    assert ran.err == ""
    found = ran.json
    counts = {name: found[name] for name in ("built", "reused", "portable", "native")}
    assert counts == {"built": BUCKETS, "reused": 0, "portable": 0, "native": BUCKETS}
    assert found["seconds"] > 0
    manifest = read_manifest(Path("bundle"))
    assert (found["bundle"], found["device"], found["bytes"]) == ("bundle", "fake", manifest.size)
    assert found["verification"] == manifest.verification
    assert found["verification"]["greedy_equal"] == found["verification"]["greedy_sequences"]
    assert found["verification"]["accuracy"]["mean_kl"] < 1e-6
    assert compile_("--json").json["reused"] == BUCKETS


def test_portable_executables_are_reported_as_such_with_what_is_left(
    compile_: Llmc, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, state="portable")
    ran = compile_()
    assert f"native 0, portable {BUCKETS}" in ran.out
    assert ran.out.splitlines()[-1] == "portable: left for the device's own host: a fake device has to be attached"
    found = compile_("--json").json
    assert (found["portable"], found["remaining"]) == (BUCKETS, "a fake device has to be attached")


# Where things go


def test_the_bundle_is_named_after_model_and_device_where_nothing_is_said(llmc: Llmc, toy: Path, here: Path) -> None:
    ran = llmc("compile", toy, "--device", "fake", *LIMITS)
    assert ran.out.startswith("toy-fake.llmc: ")
    assert [path.name for path in here.iterdir()] == ["toy-fake.llmc"]


def test_the_store_is_where_the_flag_or_else_the_environment_says(compile_: Llmc, tmp_path: Path, here: Path) -> None:
    compile_("--cache-dir", tmp_path / "mine")
    assert len(Store(tmp_path / "mine").entries("executable")) == BUCKETS
    assert not (tmp_path / "cache").exists()
    assert "from the store 0" in compile_().out
    assert len(Store(tmp_path / "cache").entries("executable")) == BUCKETS


@pytest.mark.parametrize("content", [{"thesis.tex": "irreplaceable"}, {"manifest.json": "{}", "notes": "mine"}])
def test_a_folder_that_is_no_bundle_is_not_replaced(compile_: Llmc, here: Path, content: dict[str, str]) -> None:
    (here / "bundle").mkdir()
    for name, text in content.items():
        (here / "bundle" / name).write_text(text)
    assert "not a bundle, so it is not replaced" in compile_().failed(5)
    assert {p.name: p.read_text() for p in (here / "bundle").iterdir()} == content
    assert [path.name for path in here.iterdir()] == ["bundle"]


# Plans


def test_a_plan_file_says_which_buckets(compile_: Llmc, llmc: Llmc, toy: Path) -> None:
    assert llmc("plan", toy, *LIMITS, "--decode-batch", "1,1,4", "-o", "plan.json").code == 0
    assert compile_("--plan", "plan.json", "--json").json["built"] == 3 + 4
    assert read_manifest(Path("bundle")).plan == json.loads(Path("plan.json").read_text())


def test_planning_flags_shape_the_plan(compile_: Llmc) -> None:
    compile_("--decode-batch", "4,1,4", "--prompt-seq", "16,16,31", "-q")
    plan = Plan.from_json(json.dumps(dict(read_manifest(Path("bundle")).plan)))
    assert {bucket.batch for bucket in plan.decode} == {4}
    assert {bucket.query for bucket in plan.prompt} == {16, 31}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--plan", "plan.json", "--block-size", 8], "--plan already defines the buckets; leave out --block-size"),
        (["--plan", "absent.json"], "cannot read the plan absent.json"),
        (["--plan", "damaged.json"], "damaged.json"),
        (["--max-model-len", 65], "--max-model-len 65 is above the 64 positions of"),
        (["--max-model-len", 32, "--decode-batch", "1,2"], "--decode-batch '1,2' is not MIN,STEP,MAX"),
        (["--jobs", 0], "--jobs 0 must be at least 1"),
        (["--sample-top-k", 257], "--sample-top-k 257 must be in 1 … 256, or 0 for all logits only"),
        (["--group-size", -1], "--group-size -1 must not be negative"),
        (["--activation-group-size", -1], "--activation-group-size -1 must not be negative"),
        (["--sample-top-k", -1], "--sample-top-k -1 must be in 1 … 256"),
    ],
)
def test_numbers_and_plans_that_cannot_be_used_are_usage_errors(
    compile_: Llmc, here: Path, arguments: list[Any], message: str
) -> None:
    toy_plan().save(str(here / "plan.json"))
    (here / "damaged.json").write_text("{")
    assert message in compile_(*arguments).failed(2)
    assert sorted(path.name for path in here.iterdir()) == ["damaged.json", "plan.json"]


# Names


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--device", "gpu", "unknown device 'gpu'; known: cpu, cuda, hpu"),
        ("--quantize", "int3", "unknown quantisation 'int3'; known: fp8, int4, int8, keep, none"),
        ("--dtype", "f8", "unknown dtype 'f8'; known: auto, bf16, f16, f32"),
        ("--verify", "some", "unknown verification mode 'some'; known: all, none, sample"),
        ("--strategy", "cubic", "unknown bucketing strategy 'cubic'; known: "),
        ("--executor", "slurm", "unknown executor 'slurm'; known: local, ray"),
    ],
)
def test_unknown_names_list_the_known_ones(compile_: Llmc, flag: str, value: str, message: str) -> None:
    assert compile_(flag, value).failed(2).startswith(message)


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--quantize", "int8", "--quantize int8 is not offered for device fake; offered: none"),
        ("--dtype", "bf16", "--dtype bf16 is not offered for device fake; offered: f32"),
        ("--group-size", "32", "--group-size is for cpu, onnxruntime, openvino; leave it out for fake"),
        (
            "--activation-group-size",
            "0",
            "--activation-group-size is for cpu, onnxruntime, openvino; leave it out for fake",
        ),
    ],
)
def test_what_a_device_does_not_offer_says_what_it_does(compile_: Llmc, flag: str, value: str, message: str) -> None:
    assert compile_(flag, value).failed(2) == message


# Models


def test_without_a_model_there_is_nothing_to_compile(llmc: Llmc) -> None:
    assert llmc("compile", "--device", "fake").failed(2).startswith("name the MODEL to compile (or --resume -o BUNDLE")


def test_a_model_that_is_not_there(compile_: Llmc) -> None:
    message = compile_(model="./nowhere").failed(1)
    assert message.startswith("./nowhere: no such file or folder; MODEL is a Hugging Face folder, a .gguf file")


def test_a_folder_without_a_model(compile_: Llmc, here: Path) -> None:
    (here / "empty").mkdir()
    assert "the folder has neither config.json nor a .gguf file" in compile_(model="empty").failed(1)


def test_a_file_that_is_no_model(compile_: Llmc, here: Path) -> None:
    (here / "model.gguf").write_bytes(b"not GGUF at all")
    assert "model.gguf" in compile_(model="model.gguf").failed(1)
    assert sorted(path.name for path in here.iterdir()) == ["model.gguf"]


def test_an_architecture_that_is_not_supported_lists_those_that_are(llmc: Llmc, toy: Path, here: Path) -> None:
    message = llmc("compile", toy, "--device", "cpu").failed(1)
    assert f"architecture 'toy' is not supported; supported: {', '.join(supported())}" in message
    assert list(here.iterdir()) == []


def test_weights_that_are_damaged(compile_: Llmc, toy: Path) -> None:
    file = toy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert str(file) in compile_().failed(1)


# Native, verified, or not at all


def test_native_that_this_host_cannot_make_is_exit_3_before_any_work(
    compile_: Llmc, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, here: Path
) -> None:
    use(monkeypatch, state="portable")
    assert "a fake device has to be attached" in compile_("--require-native").failed(3)
    assert compile_("--require-native", "--dry-run").failed(3)
    assert list(here.iterdir()) == []
    monkeypatch.undo()


def test_native_executables_meet_require_native(compile_: Llmc) -> None:
    assert compile_("--require-native", "--json").json["native"] == BUCKETS


def test_wrong_numbers_are_exit_4_and_publish_nothing(
    compile_: Llmc, monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    use(monkeypatch, replay=negated)
    assert "compiled graphs disagree with the reference model" in compile_("-q").failed(4)
    assert not (here / "bundle").exists()


# Dry run


def test_a_dry_run_says_what_it_would_build_and_writes_nothing(compile_: Llmc, here: Path, tmp_path: Path) -> None:
    ran = compile_("--dry-run")
    assert (ran.code, ran.err) == (0, "")
    *shapes, why, choice, total = ran.out.splitlines()
    assert shapes[0] == "prompt batch=4 query=32 context=0 (1 bucket): to build"
    assert len(shapes) == BUCKETS and all(line.endswith(": to build") for line in shapes)
    assert why.startswith("why: stage trace has to run: nothing of kind trace is stored")
    assert choice == "one executable per bucket"
    assert total.startswith(f"{BUCKETS} executables to build, 0 cached; about ")
    assert list(here.iterdir()) == []
    kinds = {entry.key.kind for entry in Store(tmp_path / "cache").entries()}
    assert kinds <= {"local-file-digest"}, "a file's digest may be remembered"


def test_a_dry_run_as_json(compile_: Llmc) -> None:
    found = compile_("--dry-run", "--json").json
    assert (found["device"], found["to_build"], found["cached"]) == ("fake", BUCKETS, 0)
    assert found["estimated_seconds"] > 0 and found["estimated_bytes"] > 0
    assert found["choice"] == "one executable per bucket"
    members = {"phase", "batch", "query", "context", "buckets", "cached", "why"}
    assert all(set(e) == members for e in found["executables"])
    (why,) = {e["why"] for e in found["executables"]}
    assert why.startswith("stage trace has to run: nothing of kind trace is stored")


def test_a_dry_run_knows_what_is_in_the_store(compile_: Llmc) -> None:
    compile_()
    found = compile_("--dry-run", "--json").json
    assert (found["to_build"], found["cached"]) == (0, BUCKETS)
    assert {e["why"] for e in found["executables"]} == {None}
    ran = compile_("--dry-run", "--decode-batch", "1,1,4")
    assert ran.out.count(": to build") == 1
    assert "decode batch=3 query=1 context=32 (1 bucket): to build" in ran.out
    assert "1 executable to build, 6 cached" in ran.out
    assert "\nwhy: shape.batch: " in ran.out
    dynamic = compile_("--dry-run", "--no-specialise").out.splitlines()
    assert dynamic[0] == "any every shape (6 buckets): to build"


def test_a_dry_run_refuses_what_a_compile_would(compile_: Llmc, here: Path) -> None:
    assert "offered: none" in compile_("--dry-run", "--quantize", "int8").failed(2)
    compile_("--dry-run", model="nowhere").failed(1)


# Going on


def journal(here: Path) -> Path:
    return here / ".bundle.compile.json"


def interrupt(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """The user presses Ctrl-C once `after` executables are done."""
    done = 0

    def compile_one(lowered: Lowered, shape: Shape, fields: dict[str, Any]) -> dict[str, Any]:
        nonlocal done
        if done == after:
            raise KeyboardInterrupt
        done += 1
        return fields

    use(monkeypatch, compiling=compile_one)


def test_an_interrupted_compile_goes_on_with_the_flags_it_had(
    llmc: Llmc, compile_: Llmc, monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    interrupt(monkeypatch, after=2)
    ran = compile_("--decode-batch", "1,1,4", "--verify", "all", "--jobs", 1)
    assert (ran.code, ran.out) == (130, "")
    said = "llmc: interrupted; finished work is kept: continue with `llmc compile --resume -o bundle`"
    assert ran.err.splitlines()[-1] == said
    assert not (here / "bundle").exists() and journal(here).exists()
    monkeypatch.undo()
    monkeypatch.chdir(here)
    monkeypatch.setenv("LLMC_CACHE_DIR", str(here.parent / "cache"))
    estimate = llmc("compile", "--resume", "-o", "bundle", "--dry-run", "--json").json
    assert (estimate["to_build"], estimate["cached"]) == (5, 2)
    found = llmc("compile", "--resume", "-o", "bundle", "--json").json
    assert (found["built"], found["reused"]) == (5, 2)
    assert found["verification"]["mode"] == "all"
    assert [path.name for path in here.iterdir()] == ["bundle"], "and the note is gone"


def test_a_killed_compile_goes_on(llmc: Llmc, toy: Path, here: Path) -> None:
    script = f"""
        import os, sys
        from llmc.cli.main import main
        from tests.devices import always, slowly
        always(compiling=slowly(0.2))
        os.chdir({str(here)!r})
        main(["compile", *sys.argv[1:]])
    """
    process = child(script, toy, "--device", "fake", *LIMITS, "-o", "bundle", "--jobs", 1)
    assert process.stderr
    for line in process.stderr:
        if line.startswith("[2/"):
            break
    process.kill()
    process.communicate()
    assert process.returncode == -9 and journal(here).exists()
    found = llmc("compile", "--resume", "-o", "bundle", "--json").json
    assert found["built"] + found["reused"] == BUCKETS and found["reused"] >= 2
    assert llmc("generate", "bundle", "--prompt", "x", "--max-tokens", 2).code == 0


def test_with_nothing_to_resume(llmc: Llmc, compile_: Llmc, here: Path) -> None:
    message = llmc("compile", "--resume", "-o", "bundle").failed(2)
    assert message == f"nothing to resume: no interrupted compile of bundle (looked for {journal(here)})"
    compile_()
    assert "nothing to resume" in llmc("compile", "--resume", "-o", "bundle").failed(2)
    assert llmc("compile", "--resume").failed(2).startswith("--resume needs -o BUNDLE")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 2}', '{"schema": 1}'])
def test_a_note_that_cannot_be_read_is_named(llmc: Llmc, here: Path, text: str) -> None:
    journal(here).write_text(text)
    message = llmc("compile", "--resume", "-o", "bundle").failed(2)
    assert message.startswith(f"{journal(here)}: cannot be read (")
    assert message.endswith("run the compile again with its flags")


def test_resuming_with_the_model_named_is_an_ordinary_compile(compile_: Llmc) -> None:
    assert compile_("--resume", "--json").json["built"] == BUCKETS


def test_what_was_refused_leaves_no_note_but_what_may_still_end_well_does(
    compile_: Llmc, monkeypatch: pytest.MonkeyPatch, toy: Path, here: Path
) -> None:
    compile_("--quantize", "int8").failed(2)
    assert list(here.iterdir()) == []

    def full(*_: object) -> dict[str, Any]:
        from llmc.errors import CapacityError

        raise CapacityError("the disk is full; free some space")

    use(monkeypatch, compiling=full)
    assert compile_("-q").failed(1) == "the disk is full; free some space"
    assert [path.name for path in here.iterdir()] == [journal(here).name]


# Compiling again


def test_changed_weights_are_compiled_again(compile_: Llmc, toy: Path) -> None:
    before = compile_("--json").json
    time.sleep(0.01)
    write_toy(toy, seed=1)
    after = compile_("--json").json
    assert before["built"] == after["built"] == BUCKETS


def test_an_old_bundle_stays_whole_while_and_after_a_compile_fails(
    compile_: Llmc, monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    compile_()
    before = {path: path.read_bytes() for path in files_below(here / "bundle")}
    interrupt(monkeypatch, after=0)
    assert compile_("--decode-batch", "1,1,4").code == 130
    assert {path: path.read_bytes() for path in files_below(here / "bundle")} == before


def test_a_terminal_gets_a_bar_and_no_line_is_lost(compile_: Llmc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    ran = compile_()
    assert ran.code == 0
    assert all(f"[{i}/{BUCKETS}]" in ran.err for i in range(1, BUCKETS + 1))
    assert ran.out.startswith("bundle: ")


def test_a_key_of_the_model_that_nothing_reads_is_named_and_nothing_is_compiled(llmc: Llmc, tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "model", "llama")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "final_logit_softcapping": 50.0}))
    for rest in (("--device", "onnxruntime", "--verify", "none"), ("--device", "hpu", "--dry-run")):
        ran = llmc("compile", model, *rest, *LIMITS, "-o", "made")
        assert "the configuration has final_logit_softcapping: 50.0, which nothing reads" in ran.failed(1)
        assert not Path("made").exists()
