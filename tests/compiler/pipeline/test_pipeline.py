"""The compile pipeline, whole, over the fake target: what it makes, reuses, refuses and survives."""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import shutil
import signal
import socket
import threading
import time
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.artifacts.bundle.manifest import read_manifest
from llmc.artifacts.bundle.reader import BundleFiles
from llmc.artifacts.key import Key
from llmc.artifacts.store.store import Store
from llmc.buckets.limits import Limits
from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import VerifyReport, dry_run
from llmc.compiler.pipeline.executors import base as executors_base
from llmc.compiler.pipeline.executors import local
from llmc.compiler.pipeline.executors.base import executable_key
from llmc.compiler.pipeline.resolve import CompileJob
from llmc.compiler.stages import Stages
from llmc.compiler.targets import open_target
from llmc.compiler.targets.base import CompiledExecutable, Lowered, Shape
from llmc.compiler.targets.fake import FakeTarget
from llmc.compiler.verification.limits import VerificationPolicy
from llmc.compiler.verification.limits import limits as verification_limits
from llmc.compiler.verification.parts import sample_buckets
from llmc.compiler.verification.verify import summarise
from llmc.errors import (
    ArtifactError,
    CapacityError,
    CheckpointError,
    CompileError,
    DeviceError,
    InputError,
    UnknownNameError,
    VerificationError,
)
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.executors.fake.executor import FakeExecutor, FakeProgram
from llmc.runtime.llm import BundleLLM
from llmc.testing.toy import DECODE, EOS, PROMPT, VOCAB, toy_plan, write_toy
from tests.artifacts.helpers import Faults, child, files_below, finish, flip
from tests.devices import Replay, noting, use, wrong_for
from tests.tiers import default_cases, full
from tests.timing import PATIENCE_S
from tests.toy import Toy, greedy

BUCKETS = len(PROMPT) + len(DECODE)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a toy, its bundle, and a store that has all executables of both kinds."""
    toy = Toy.make(tmp_path_factory.mktemp("compiled"))
    toy.compile(specialise=False, verify="none")
    toy.compile(verify="none")
    return toy.bundle.parent


@pytest.fixture
def unverified(compiled: Path, tmp_path: Path) -> Toy:
    """A copy of `compiled`: only verification is left to do."""
    folder = shutil.copytree(compiled, tmp_path / "copy")
    return Toy(folder / "toy", Store(folder / "store"), folder / "bundle")


def prompts(count: int, longest: int = 31, seed: int = 0) -> list[list[int]]:
    """Ragged prompts of token ids."""
    random = np.random.default_rng(seed)
    return [random.integers(0, VOCAB, random.integers(1, longest + 1)).tolist() for _ in range(count)]


def generate(bundle: Path, ids: list[list[int]], count: int = 8) -> list[list[int]]:
    with BundleLLM(bundle) as llm:
        created = llm.generate(ids, SamplingParams(max_tokens=count, temperature=0, ignore_eos=True))
        assert llm.compilations == 0
    return [output.outputs[0].token_ids for output in created]


def content(bundle: Path) -> dict[str, bytes]:
    """A bundle's files, without the notes of what was verified."""
    files = {str(path.relative_to(bundle)): path.read_bytes() for path in files_below(bundle)}
    return {name: data for name, data in files.items() if name != ".stamps.json"}


# What is made


@pytest.mark.parametrize("specialise", [True, False])
def test_a_bundle_generates_what_the_reference_does(toy: Toy, specialise: bool) -> None:
    result = toy.compile(specialise=specialise)
    ids = prompts(11)
    wanted = greedy(toy.model, ids, 8)
    created = generate(toy.bundle, ids)
    assert created == [tokens[: 32 - len(prompt)] for tokens, prompt in zip(wanted, ids, strict=True)]
    assert result.specialised is specialise
    assert result.built == len(read_manifest(toy.bundle).executables) == (BUCKETS if specialise else 1)


def test_the_manifest_states_what_the_bundle_is(toy: Toy) -> None:
    result = toy.compile()
    manifest = read_manifest(toy.bundle)
    assert (manifest.device, manifest.target, manifest.executor) == ("fake", "fake", "fake")
    assert dict(manifest.toolchain) == {"fake": "1.0"}
    assert manifest.plan == json.loads(toy.plan.to_json())
    assert manifest.model["vocab_size"] == VOCAB
    assert manifest.model["eos_token_ids"] == [EOS]
    assert (manifest.model["layers"], manifest.model["kv_heads"], manifest.model["head_dim"]) == (1, 1, 8)
    assert set(manifest.files) == {"weights", "tokenizer.json", "chat_template.jinja", "chat_format.json"}
    assert manifest.options["static_dims"] == ["batch", "query", "context"]
    shapes = {(e.phase, e.batch, e.query, e.context) for e in manifest.executables}
    assert shapes == {(b.phase, b.batch, b.query, b.context) for b in toy.plan.buckets}
    assert all(e.state == "native" and e.buckets == 1 for e in manifest.executables)
    assert manifest.provenance["model"] == toy.model.name
    assert manifest.verification == result.verification
    assert (
        result.bytes == manifest.size == sum(f.stat().st_size for f in (toy.bundle / "blobs").rglob("*") if f.is_file())
    )
    assert result.weights_bytes == 2 * VOCAB * 8 * 4
    assert (result.native, result.portable, result.reused) == (BUCKETS, 0, 0)
    assert json.loads(json.dumps(result.to_json())) == result.to_json()


def test_weights_are_stored_once_and_executables_only_name_them(toy: Toy) -> None:
    toy.compile()
    manifest = read_manifest(toy.bundle)
    with BundleFiles.open(toy.bundle) as files:
        for executable in manifest.executables:
            program = json.loads(files.read(executable.blob))
            assert program["weights"] == manifest.files["weights"]
            assert manifest.blobs[executable.blob] < 500
    assert manifest.blobs[manifest.files["weights"]] == 2 * VOCAB * 8 * 4


def test_events_count_up_to_their_totals(toy: Toy) -> None:
    toy.compile()
    assert [(e.index, e.total) for e in toy.executables] == [(i, BUCKETS) for i in range(1, BUCKETS + 1)]
    assert all(not e.cached and e.state == "native" and e.size > 0 for e in toy.executables)
    verified = [e for e in toy.events if isinstance(e, VerifyReport)]
    assert [e.done for e in verified] == list(range(1, verified[-1].total + 1))
    assert {"weights", "tokenizer", "reference", "verify"} <= toy.built_stages


def test_a_model_without_a_tokenizer_makes_a_bundle_of_token_ids(tmp_path: Path) -> None:
    toy = Toy.make(tmp_path, tokenizer=False, vocab=40)
    toy.compile()
    ids = [[1, 2, 3], [39]]
    assert generate(toy.bundle, ids) == greedy(toy.model, ids, 8)
    with BundleLLM(toy.bundle) as llm, pytest.raises(ArtifactError, match="no tokenizer in the bundle"):
        llm.generate("text")


def test_the_smallest_plan_there_is(toy: Toy) -> None:
    toy.compile(toy_plan([(1, 1, 0)], [(1, 1)], Limits(2, 1)))
    ids = prompts(3, longest=1)
    assert generate(toy.bundle, ids) == greedy(toy.model, ids, 1)


def test_the_fake_pipeline_imports_no_heavy_package(toy: Toy) -> None:
    script = """
        import sys
        from pathlib import Path
        from llmc.artifacts.store.store import Store
        from tests.toy import Toy
        Toy.verifies = True
        from llmc.runtime.llm import BundleLLM
        folder = Path(sys.argv[1])
        toy = Toy(folder / "toy", Store(folder / "store"), folder / "bundle")
        toy.compile()
        with BundleLLM(toy.bundle) as llm:
            llm.generate("text")
        print([name for name in ("torch", "transformers", "onnx", "onnxruntime", "gguf") if name in sys.modules])
    """
    assert finish(child(script, toy.model.parent)) == "[]"


# What is reused


def test_a_second_compile_builds_nothing(toy: Toy) -> None:
    first = toy.compile()
    before = content(toy.bundle)
    second = toy.compile()
    assert (second.built, second.reused) == (0, BUCKETS)
    assert toy.built_stages == set()
    assert all(e.cached for e in toy.executables)
    assert content(toy.bundle) == before
    assert second.verification == first.verification


def test_one_more_bucket_builds_exactly_one(toy: Toy) -> None:
    toy.compile()
    grown = toy.compile(toy_plan(decode=[*DECODE, (3, 24)]))
    assert (grown.built, grown.reused) == (1, BUCKETS)
    assert [str(e.shape) for e in toy.executables if not e.cached] == ["decode batch=3 query=1 context=24"]
    assert "weights" not in toy.built_stages and "reference" not in toy.built_stages
    ids = prompts(3, longest=20)
    assert generate(toy.bundle, ids) == greedy(toy.model, ids, 8)


def test_dynamic_and_specialised_share_weights_and_reference(toy: Toy) -> None:
    toy.compile()
    assert toy.compile(specialise=False).built == 1
    assert toy.built_stages == {"verify"}
    assert toy.compile(toy_plan(decode=[*DECODE, (3, 24)]), specialise=False).built == 0, "one serves any plan"


def test_another_destination_is_filled_from_the_store(toy: Toy, tmp_path: Path) -> None:
    toy.compile()
    copy = tmp_path / "deep" / "copy"
    assert toy.compile(bundle=copy).built == 0
    assert content(copy) == content(toy.bundle)


def test_a_new_tokenizer_keeps_the_executables(toy: Toy) -> None:
    toy.compile()
    (toy.model / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    assert toy.compile().built == 0
    assert "chat_template.jinja" not in read_manifest(toy.bundle).files


@pytest.mark.parametrize("what", ["executable", "weights"])
def test_damage_in_the_store_is_healed_by_the_next_compile(toy: Toy, what: str) -> None:
    toy.compile()
    before = content(toy.bundle)
    manifest = read_manifest(toy.bundle)
    digest = manifest.files["weights"] if what == "weights" else manifest.executables[0].blob
    flip(toy.store.path(digest))
    store = Store(toy.store.root)
    result = toy.compile(store=store)
    assert store.counters["corrupt"] > 0
    assert result.built == (what == "executable")
    assert ("weights" in toy.built_stages) == (what == "weights")
    assert content(toy.bundle) == before, "healed too, though it shared the damaged file"


def test_a_dry_run_builds_nothing_and_says_what_is_cached(toy: Toy) -> None:
    options = CompileOptions(device="fake")
    dry_run(CompileJob.of(str(toy.model), toy.plan, options), toy.store)
    assert toy.store.entries("executable") == []
    toy.compile()
    before = len(toy.store.entries())
    dry_run(CompileJob.of(str(toy.model), toy.plan, options), toy.store)
    assert len(toy.store.entries()) == before


# Parallel jobs


def test_jobs_compile_at_the_same_time_to_the_same_bundle(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.compile()
    together, crowd = threading.Barrier(3, timeout=PATIENCE_S), threading.Semaphore(3)

    def meet(lowered: Lowered, shape: Shape, fields: dict[str, Any]) -> dict[str, Any]:
        if crowd.acquire(blocking=False):
            together.wait()
        return fields

    use(monkeypatch, compiling=meet)
    copy = toy.bundle.with_name("copy")
    assert toy.compile(bundle=copy, store=Store(toy.store.root.with_name("other")), jobs=3).built == BUCKETS
    assert content(copy) == content(toy.bundle)


class InProcesses(FakeTarget):
    description = replace(FakeTarget.description, needs_processes=True)


def test_targets_that_need_processes_get_them(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, target=InProcesses)
    monkeypatch.setattr(local, "compile_in_worker", compile_and_name_the_process)
    toy.compile(jobs=2, verify="none")
    with BundleFiles.open(toy.bundle) as files:
        pids = {json.loads(files.read(e.blob))["pid"] for e in files.manifest.executables}
    assert os.getpid() not in pids and 1 <= len(pids) <= 2


def compile_and_name_the_process(
    device: str, lowered: Lowered, shape: Shape, options: CompileOptions
) -> CompiledExecutable:
    created = open_target(device).compile(lowered, shape, options)
    return CompiledExecutable(json.dumps({**json.loads(created.data), "pid": os.getpid()}).encode(), created.state)


def test_a_worker_that_is_killed_is_a_compile_error(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, target=InProcesses)
    monkeypatch.setattr(local, "compile_in_worker", die)
    with pytest.raises(CompileError, match=r"killed while (prompt|decode) batch=\d.* fewer than --jobs 2"):
        toy.compile(jobs=2)
    assert not toy.bundle.exists()


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_an_interrupt_ends_the_processes_that_compile_at_once(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, target=InProcesses)
    monkeypatch.setattr(local, "compile_in_worker", interrupt_all_and_go_on)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        toy.compile(jobs=2)
    assert time.monotonic() - began < LONG_S / 2
    assert not [child for child in active_children() if child.is_alive()]
    assert "Traceback" not in capfd.readouterr().err
    assert not toy.bundle.exists()


LONG_S = 600


def interrupt_all_and_go_on(*_: object) -> CompiledExecutable:
    """Ctrl-C reaches this process too, in the middle of work that takes long."""
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(LONG_S)
    raise AssertionError("nobody ended this process")


# Verification


def pads_count(program: FakeProgram, ids: Any, past: Any, new: Any, cache: Any) -> Any:
    return program.replay(ids, past, np.full_like(new, ids.shape[1]), cache)


def pads_shift_all_logits_a_little(program: FakeProgram, ids: Any, past: Any, new: Any, cache: Any) -> Any:
    logits, vectors = program.replay(ids, past, new, cache)
    pads = np.where(np.arange(ids.shape[1]) < new[:, None], 0, ids).sum(1, keepdims=True)
    return logits + np.float32(1e-3) * pads.astype(np.float32), vectors


def unused_cache_counts(program: FakeProgram, ids: Any, past: Any, new: Any, cache: Any) -> Any:
    return program.replay(ids, np.full_like(past, cache.shape[1]), new, cache)


def unused_cache_shifts_all_logits_a_little(program: FakeProgram, ids: Any, past: Any, new: Any, cache: Any) -> Any:
    logits, vectors = program.replay(ids, past, new, cache)
    unused = np.where((np.arange(cache.shape[1]) >= past[:, None])[..., None], np.nan_to_num(cache), 0)
    return logits + np.float32(1e-6) * unused.sum((1, 2), keepdims=True)[..., 0], vectors


def other_rows_count(program: FakeProgram, ids: Any, past: Any, new: Any, cache: Any) -> Any:
    logits, vectors = program.replay(ids, past, new, cache)
    return logits + np.float32(0.05) * np.roll(logits, 1, 0) * (len(logits) > 1), vectors


def logits_a_little_steeper(program: FakeProgram, ids: Any, past: Any, new: Any, cache: Any) -> Any:
    logits, vectors = program.replay(ids, past, new, cache)
    return logits * np.float32(1.02), vectors


def logits_of_the_next_token(program: FakeProgram, ids: Any, past: Any, new: Any, cache: Any) -> Any:
    logits, vectors = program.replay(ids, past, new, cache)
    return np.roll(logits, 1, 1), vectors


def past_ignored(program: FakeProgram, ids: Any, past: Any, new: Any, cache: Any) -> Any:
    return program.replay(ids, np.zeros_like(past), new, cache)


def past_off_by_one(program: FakeProgram, ids: Any, past: Any, new: Any, cache: Any) -> Any:
    return program.replay(ids, np.maximum(past - 1, 0), new, cache)


def positions_of_the_bucket(program: FakeProgram, ids: Any, past: Any, new: Any, cache: Any) -> Any:
    logits, _ = program.replay(ids, past, new, cache)
    _, vectors = program.replay(ids, np.full_like(past, cache.shape[1]), new, cache)
    return logits, vectors


def nan_logits(program: FakeProgram, ids: Any, past: Any, new: Any, cache: Any) -> Any:
    logits, vectors = program.replay(ids, past, new, cache)
    return np.full_like(logits, np.nan), vectors


def infinite_logits(program: FakeProgram, ids: Any, past: Any, new: Any, cache: Any) -> Any:
    logits, vectors = program.replay(ids, past, new, cache)
    logits[:, 7] = np.inf
    return logits, vectors


BROKEN = {
    pads_count: None,
    pads_shift_all_logits_a_little: "padding leaks into results in prompt",
    unused_cache_counts: None,
    unused_cache_shifts_all_logits_a_little: "padding leaks into results in",
    other_rows_count: None,
    logits_a_little_steeper: "disagree with the reference model in",
    logits_of_the_next_token: None,
    past_ignored: None,
    past_off_by_one: None,
    positions_of_the_bucket: None,
    nan_logits: None,
    infinite_logits: None,
}


# Exact shapes have no pads, nor a bucket's positions.
PADDED = (pads_count, pads_shift_all_logits_a_little, positions_of_the_bucket)
CASES = [(broken, True) for broken in BROKEN] + [(broken, False) for broken in BROKEN if broken not in PADDED]


@default_cases(4)
@pytest.mark.parametrize(("broken", "specialise"), CASES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_broken_graphs_are_never_published(
    unverified: Toy, monkeypatch: pytest.MonkeyPatch, broken: Replay, specialise: bool
) -> None:
    toy, before = unverified, content(unverified.bundle)
    use(monkeypatch, replay=broken)
    for bundle in (toy.bundle, toy.bundle.with_name("elsewhere")):
        with pytest.raises(VerificationError, match=BROKEN[broken]) as caught:
            toy.compile(bundle=bundle, specialise=specialise)
        assert caught.value.exit_code == 4
    assert content(toy.bundle) == before
    assert sorted(path.name for path in toy.bundle.parent.iterdir()) == ["bundle", "store", "toy"]
    monkeypatch.undo()
    result = toy.compile(specialise=specialise)
    assert result.built == 0, "executables are kept, the verdict is not"
    assert result.verification["mode"] == "sample"


@pytest.mark.parametrize("portable", [False, True])
def test_what_is_verified_on_the_cpu_is_opened_as_its_portable_half_whatever_device_is_here(
    unverified: Toy, monkeypatch: pytest.MonkeyPatch, portable: bool
) -> None:
    opened: list[bool] = []
    see = noting(lambda what, of: opened.append(of.settings.open_portable) if what == "check" else None)
    use(monkeypatch, executor=see)
    monkeypatch.setattr(FakeTarget, "verification", VerificationPolicy(portable=portable))
    unverified.compile()
    assert opened == [portable]


class CopiesNothing(FakeExecutor):
    def copy_prefix(self, source: int, target: int, length: int) -> None:
        self._held.copied(source, target, length)


class CopiesOneLess(FakeExecutor):
    def copy_prefix(self, source: int, target: int, length: int) -> None:
        self._cache[target, : length - 1] = self._cache[source, : length - 1]
        self._held.copied(source, target, length)


class WritesOneSlotLower(FakeExecutor):
    def run(self, step: Any) -> Any:
        logits = super().run(step)
        for row, slot in enumerate(step.slots):
            end = int(step.past_lengths[row] + step.new_lengths[row])
            self._cache[max(0, slot - 1), end - 1] = self._cache[slot, end - 1]
        return logits


@pytest.mark.parametrize("broken", [CopiesNothing, CopiesOneLess, WritesOneSlotLower])
def test_a_broken_cache_is_found_by_generating(
    unverified: Toy, monkeypatch: pytest.MonkeyPatch, broken: type[FakeExecutor]
) -> None:
    use(monkeypatch, executor=broken)
    with pytest.raises(
        VerificationError, match=r"greedy token \d+ of probe prompt \d is \d+, the reference model's is \d+"
    ):
        unverified.compile()
    assert read_manifest(unverified.bundle).verification == {"mode": "none"}


@default_cases(6)
@pytest.mark.parametrize("at", range(BUCKETS))
@pytest.mark.parametrize("verify", ["sample", "all"])
def test_one_wrong_executable_among_many_is_named(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, at: int, verify: str
) -> None:
    """Wherever in the plan it is: every executable is run, also where buckets are sampled."""
    wrong = toy.plan.buckets[at]
    use(monkeypatch, compiling=wrong_for(wrong.phase, wrong.batch, wrong.query, wrong.context))
    with pytest.raises(VerificationError, match=re.escape(f"disagree with the reference model in {wrong}: mean KL")):
        toy.compile(verify=verify)
    assert not toy.bundle.exists()


ROW = {"equal": [True], "max_abs": 0.0, "leak": 0.0, "runs": 1, "longest": 9, "executables": ["decode batch=1"]}


def of_format(quantize: str, dtype: str) -> list[Any]:
    """Limits, what 500 right buckets are like, and one wrong one that a mean over all of them would hide."""
    limits = verification_limits(quantize, dtype)
    return [limits, [{"bucket": f"right {i}", "kl": [limits.mean_kl / 3] * 2, **ROW} for i in range(500)]]


@pytest.mark.parametrize("quantize", ["none", "int8", "keep", "int4"])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize(("rows", "kl"), [(1, 3.0), (256, 4.5)])
def test_one_wrong_bucket_cannot_hide_among_many_right_ones(quantize: str, dtype: str, rows: int, kl: float) -> None:
    """Neither a bucket of one row, nor one row among all those of a large bucket: whatever formats may cost."""
    limits, right = of_format(quantize, dtype)
    assert summarise(right, limits).mean_kl == pytest.approx(limits.mean_kl / 3)
    wrong = {"bucket": "decode[1x1+8]", **ROW, "kl": [*[limits.mean_kl / 3] * (rows - 1), kl]}
    assert np.mean([k for o in [*right, wrong] for k in o["kl"]]) < limits.mean_kl or limits.mean_kl < 0.03
    with pytest.raises(
        VerificationError, match=re.escape("disagree with the reference model in decode[1x1+8]: mean KL")
    ):
        summarise([*right, wrong], limits)


def test_buckets_that_continue_from_a_wrong_one_are_named_after_it() -> None:
    limits, right = of_format("none", "f32")
    wrong = [{"bucket": f"wrong {i}", **ROW, "kl": [5e-3 * (i + 1)]} for i in range(9)]
    message = (
        "in wrong 0: mean KL 0.005 (limit 1e-05) over its 1 rows, the worst 0.005 (limit 1e-05); also in wrong 1, "
    )
    with pytest.raises(VerificationError, match=re.escape(message)) as caught:
        summarise([*right, *wrong], limits)
    assert str(caught.value).endswith("wrong 5 and 3 more")


def test_verify_modes(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    sampled = toy.compile(verify="sample").verification
    assert sampled["mode"] == "sample"
    assert sampled["twice"] == len(sample_buckets(toy.plan.buckets, every=False)) < BUCKETS
    assert sampled["executables"] == sampled["buckets"] == BUCKETS, "the others are run once"
    everything = toy.compile(verify="all").verification
    assert (everything["mode"], everything["buckets"], everything["reference"]) == ("all", BUCKETS, "toy")
    assert everything["greedy_equal"] == everything["greedy_sequences"] > 0
    assert everything["rows"] == sampled["rows"] >= sampled["buckets"] and everything["twice"] == BUCKETS
    assert everything["mean_kl"] < 1e-9 and everything["leak"] < 1e-5 and everything["top1"] == 1.0
    assert everything["limits"] == {
        "mean_kl": 1e-5, "top1": 1.0, "greedy_equal": True, "bucket_kl": 1e-5, "row_kl": 1e-5, "quality": "exact",
    }  # fmt: skip
    use(monkeypatch, replay=nan_logits)
    unverified = toy.compile(verify="none", store=Store(toy.store.root.with_name("fresh")))
    assert unverified.verification == {"mode": "none"} == read_manifest(toy.bundle).verification
    assert unverified.built == BUCKETS


def test_a_verdict_is_kept_with_what_it_was_found_on(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.compile()
    use(monkeypatch, replay=nan_logits)
    toy.compile()  # not run again
    write_toy(toy.model, seed=1)
    with pytest.raises(VerificationError):
        toy.compile()


# What is refused


def test_names_that_nobody_knows(toy: Toy) -> None:
    with pytest.raises(UnknownNameError, match="unknown device 'gpu'; known: cpu, cuda, hpu") as caught:
        toy.compile(device="gpu")
    assert caught.value.exit_code == 2
    with pytest.raises(UnknownNameError, match="unknown quantisation 'int3'; known: fp8, int4, int8, keep, none"):
        toy.compile(quantize="int3")
    with pytest.raises(UnknownNameError, match="unknown dtype 'f8'"):
        toy.compile(dtype="f8")
    with pytest.raises(UnknownNameError, match="unknown verification mode 'some'"):
        toy.compile(verify="some")
    assert not toy.store.root.exists()


def test_what_the_target_does_not_offer(toy: Toy) -> None:
    with pytest.raises(InputError, match="--quantize int8 is not offered for device fake; offered: none"):
        toy.compile(quantize="int8")
    with pytest.raises(InputError, match="--dtype bf16 is not offered for device fake; offered: f32"):
        toy.compile(dtype="bf16")
    with pytest.raises(InputError, match="jobs 0"):
        toy.compile(jobs=0)
    assert not toy.store.root.exists()


def test_native_that_this_host_cannot_make(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, state="portable")
    with pytest.raises(DeviceError, match=r"only portable on this host.*a fake device has to be attached") as caught:
        toy.compile(require_native=True)
    assert caught.value.exit_code == 3
    assert not toy.store.root.exists(), "refused before any work"
    result = toy.compile()
    assert (result.portable, result.native, result.remaining) == (BUCKETS, 0, "a fake device has to be attached")
    assert {e.state for e in read_manifest(toy.bundle).executables} == {"portable"}
    with BundleLLM(toy.bundle) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, temperature=0))
        assert llm.compilations == 2, "a portable executable is finished here, which counts"
    monkeypatch.undo()
    assert toy.compile(require_native=True).native == BUCKETS, "portable ones do not stand in for native ones"


def test_models_that_are_not_toys(toy: Toy) -> None:
    write_toy(toy.model, model_type="llama")
    with pytest.raises(CheckpointError, match="'llama' is not supported by this device; supported: toy"):
        toy.compile()
    write_toy(toy.model, hidden_size=9)
    with pytest.raises(CheckpointError, match=r"has shape \[257, 8\].*\[257, 9\]"):
        toy.compile()
    with pytest.raises(CheckpointError):
        toy.compile(model=toy.model / "nowhere")
    assert not toy.bundle.exists()


def test_a_destination_that_is_no_bundle_is_found_before_any_work(toy: Toy) -> None:
    toy.bundle.mkdir()
    (toy.bundle / "thesis.tex").write_text("irreplaceable")
    with pytest.raises(ArtifactError, match="not a bundle, so it is not replaced"):
        toy.compile()
    assert toy.events == []
    assert (toy.bundle / "thesis.tex").read_text() == "irreplaceable"


# Errors in the middle


@pytest.mark.parametrize("jobs", [1, 3])
def test_one_shape_that_fails_is_one_clear_error(toy: Toy, monkeypatch: pytest.MonkeyPatch, jobs: int) -> None:
    toy.compile(toy_plan(decode=[*DECODE, (3, 32)]))
    before = content(toy.bundle)

    def fail(lowered: Lowered, shape: Shape, fields: dict[str, Any]) -> dict[str, Any]:
        if (shape.phase, shape.batch, shape.context) == ("decode", 2, 16):
            raise CompileError(f"the vendor's compiler refuses {shape}")
        return fields

    use(monkeypatch, compiling=fail)
    fresh = Store(toy.store.root.with_name("fresh"))
    with pytest.raises(CompileError, match=r"^the vendor's compiler refuses decode batch=2 query=1 context=16$"):
        toy.compile(store=fresh, jobs=jobs)
    kept = len(fresh.entries("executable"))
    assert content(toy.bundle) == before
    assert files_below(fresh.root / "v1" / "tmp") == []
    monkeypatch.undo()
    result = toy.compile(store=fresh)
    assert (result.built, result.reused) == (BUCKETS - kept, kept)


def test_a_failing_shape_takes_nothing_from_those_that_still_compile(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder with the shared files lives as long as a compile that reads it."""
    failing, seen = threading.Event(), []

    def fail_or_wait(lowered: Lowered, shape: Shape, fields: dict[str, Any]) -> dict[str, Any]:
        if shape == toy_first:
            failing.wait(PATIENCE_S)
            raise CompileError("refused")
        failing.set()
        time.sleep(0.2)
        seen.append(sorted(path.name for path in lowered.folder.iterdir()))
        return fields

    toy_first = FakeTarget().shapes(toy.plan.buckets, FakeTarget().configure(CompileOptions("fake")))[0]
    use(monkeypatch, compiling=fail_or_wait)
    with pytest.raises(CompileError, match="refused"):
        toy.compile(jobs=2)
    assert seen and all(len(names) == 1 for names in seen)
    assert len(toy.store.entries("executable")) == len(seen)


def test_an_interrupt_stops_and_keeps_what_was_done(toy: Toy) -> None:
    def interrupt(event: Any) -> None:
        if len(toy.executables) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        toy.compile(report=interrupt)
    assert not toy.bundle.exists()
    assert toy.compile().reused >= 3


# Processes: killed, and two at once

CHILD = """
    import sys
    from pathlib import Path
    from llmc.artifacts.store.store import Store
    from tests.devices import always, slowly
    from tests.toy import Toy
    Toy.verifies = True
    folder = Path(sys.argv[1])
    always(compiling=slowly(float(sys.argv[2])))
    toy = Toy(folder / "toy", Store(folder / "store"), folder / "bundle")
    result = toy.compile(report=lambda event: print(event, flush=True))
    print(f"built {result.built} reused {result.reused}")
"""


@default_cases(2)
@pytest.mark.parametrize(
    "moment", ["name='weights', cached=False, seconds=None", "index=3, ", "index=8, ", "name='verify'"]
)
def test_kill_9_loses_nothing_that_was_done(toy: Toy, moment: str) -> None:
    process = child(CHILD, toy.model.parent, 0.02)
    assert process.stdout
    done = 0
    for line in process.stdout:
        done += line.startswith("ExecutableReport")
        if moment in line:
            break
    process.kill()
    process.communicate()
    assert not toy.bundle.exists()
    last = finish(child(CHILD, toy.model.parent, 0)).splitlines()[-1]
    built, reused = int(last.split()[1]), int(last.split()[3])
    assert built + reused == BUCKETS and reused >= done
    assert BundleFiles.open(toy.bundle).verify() == []
    ids = prompts(5)
    assert [t[:1] for t in generate(toy.bundle, ids)] == greedy(toy.model, ids, 1)


@full
def test_two_compiles_of_one_bundle_at_once(toy: Toy) -> None:
    both = [child(CHILD, toy.model.parent, 0.02) for _ in range(2)]
    built = [int(finish(process).splitlines()[-1].split()[1]) for process in both]
    assert sum(built) == BUCKETS, "each executable was compiled once"
    assert BundleFiles.open(toy.bundle).verify() == []
    assert sorted(path.name for path in toy.bundle.parent.iterdir()) == ["bundle", "store", "toy"]
    assert toy.compile().built == 0


# Disks that are full


FULL = [("write", errno.ENOSPC), ("mkdir", errno.ENOSPC), ("rename", errno.ENOSPC), ("fsync", errno.EIO)]
FULL += [("open", errno.EDQUOT), ("link", errno.EPERM)]


@default_cases(2)
@pytest.mark.parametrize("after", [0, 9, 40, 70])
@pytest.mark.parametrize(("call", "code"), FULL)
def test_a_store_without_room_never_breaks_a_compile(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, call: str, code: int, after: int
) -> None:
    faults = Faults(monkeypatch, toy.store.root)
    faults.inject(call, code, after=after)
    result = toy.compile()
    monkeypatch.undo()
    assert result.verification["mode"] == "sample"
    assert BundleFiles.open(toy.bundle).verify() == []
    assert files_below(toy.store.root / "v1" / "tmp") == []
    store = Store(toy.store.root)
    assert store.verify().bad == []
    assert toy.compile(store=store).verification == result.verification


def test_a_destination_without_room_keeps_the_old_bundle(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.compile()
    before = content(toy.bundle)
    with monkeypatch.context() as patch:
        Faults(patch, toy.bundle.parent / f".{toy.bundle.name}.").inject("write", errno.ENOSPC)
        with pytest.raises(CapacityError, match=r"No space left on device.*choose another folder with -o") as caught:
            toy.compile(toy_plan(decode=[*DECODE, (3, 24)]))
    assert caught.value.exit_code == 1
    assert content(toy.bundle) == before
    assert sorted(path.name for path in toy.bundle.parent.iterdir()) == ["bundle", "store", "toy"]
    assert toy.compile(toy_plan(decode=[*DECODE, (3, 24)])).built == 0, "the work was not in vain"


LIMITED = """
    import resource, sys
    from pathlib import Path
    from llmc.artifacts.store.store import Store
    from llmc.errors import CapacityError
    from tests.toy import Toy
    Toy.verifies = True
    folder, limit = Path(sys.argv[1]), int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    toy = Toy(folder / "toy", Store(folder / "limited"), folder / "bundle")
    try:
        toy.compile()
    except CapacityError as error:
        print(error)
    else:
        print("done")
"""


def test_no_room_anywhere_is_one_clear_error(toy: Toy) -> None:
    toy.compile(toy_plan(decode=[*DECODE, (3, 24)]))
    before = content(toy.bundle)
    message = finish(child(LIMITED, toy.model.parent, 9000))
    assert "File too large" in message and "free some space" in message
    assert content(toy.bundle) == before
    assert finish(child(LIMITED, toy.model.parent, 1 << 20)) == "done"


# Keys


class Keyed:
    """The key of one executable, with anything of it changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.toy = Toy.make(folder)
        self.shape = Shape("decode", 2, 1, 16)

    def key(
        self, model: Path | None = None, shape: Shape | None = None, target: FakeTarget | None = None, **options: Any
    ) -> Key:
        target = target or FakeTarget()
        requested = target.configure(CompileOptions(device="fake"))
        run = Stages(self.toy.store, open_checkpoint(model or self.toy.model), self.toy.plan, lambda _: None)
        created = target.lower(run, target.trace(run, requested), requested)
        return executable_key(target, created, shape or self.shape, replace(requested, **options))

    def changed(self, before: Key, after: Key) -> set[str]:
        assert (before == after) == (before.digest == after.digest)
        return {difference.name for difference in before.explain(after)}


@pytest.fixture
def keyed(tmp_path: Path) -> Keyed:
    return Keyed(tmp_path)


def test_what_shapes_an_executable_changes_its_key(keyed: Keyed, monkeypatch: pytest.MonkeyPatch) -> None:
    base = keyed.key()
    shape = keyed.shape
    assert keyed.changed(base, keyed.key(shape=replace(shape, phase="prompt"))) == {"shape.phase"}
    assert keyed.changed(base, keyed.key(shape=replace(shape, batch=3))) == {"shape.batch"}
    assert keyed.changed(base, keyed.key(shape=replace(shape, query=2))) == {"shape.query"}
    assert keyed.changed(base, keyed.key(shape=replace(shape, context=17))) == {"shape.context"}
    assert keyed.changed(base, keyed.key(shape=replace(shape, context=None))) == {"shape.context"}
    assert keyed.changed(base, keyed.key(quantize="int8")) == {"option.quantize"}
    assert keyed.changed(base, keyed.key(dtype="bf16")) == {"option.dtype"}
    weights = keyed.key(model=write_toy(keyed.folder / "other weights", seed=1))
    assert keyed.changed(base, weights) == {"input.weights"}
    positions = keyed.key(model=write_toy(keyed.folder / "other config", positions=128))
    assert keyed.changed(base, positions) == {"input.positions"}
    shapes = keyed.key(model=write_toy(keyed.folder / "other shapes", hidden=4))
    assert keyed.changed(base, shapes) == {"input.weights", "input.placements"}
    for attribute, value, component in (
        ("toolchain", lambda self: {"fake": "1.1"}, "toolchain.fake"),
        ("isa", lambda self: ("avx512f",), "isa"),
        ("description", replace(FakeTarget.description, name="fake2"), "target"),
        ("state", "portable", "state"),
    ):
        other = type("Other", (FakeTarget,), {attribute: value})
        assert keyed.changed(base, keyed.key(target=other())) == {component}
    with monkeypatch.context() as patch:
        patch.setattr(executors_base, "code_digest", lambda *makers: "sha256:" + "0" * 64)
        assert keyed.changed(base, keyed.key()) == {"code"}
    assert keyed.key() == base


def test_what_does_not_shape_an_executable_is_not_in_its_key(keyed: Keyed, monkeypatch: pytest.MonkeyPatch) -> None:
    base = keyed.key()
    for option in ({"jobs": 7}, {"verify": "all"}, {"require_native": True}):
        assert keyed.key(**option) == base
    assert keyed.key(shape=replace(keyed.shape, buckets=5)) == base
    moved = shutil.copytree(keyed.toy.model, keyed.folder / "moved" / "far away")
    os.utime(moved / "model.safetensors", (1, 1))
    (keyed.folder / "elsewhere").mkdir()
    monkeypatch.chdir(keyed.folder / "elsewhere")
    monkeypatch.setenv("HOME", "/nowhere")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("LLMC_THREADS", "1")
    monkeypatch.setattr(socket, "gethostname", lambda: "another-host")
    monkeypatch.setattr(platform, "node", lambda: "another-host")
    monkeypatch.setattr(os, "getpid", lambda: 4242)
    later = time.time() + 1e6
    monkeypatch.setattr(time, "time", lambda: later)
    keyed.toy.store = Store(keyed.folder / "another store")
    assert keyed.key(model=moved) == base
    assert keyed.key(model=Path(os.path.relpath(moved))) == base


def test_a_moved_checkpoint_is_the_same_checkpoint(toy: Toy, tmp_path: Path) -> None:
    toy.compile()
    moved = shutil.copytree(toy.model, tmp_path / "moved")
    result = toy.compile(model=moved)
    assert result.built == 0
    assert toy.built_stages == set(), "nothing was done again"
    assert read_manifest(toy.bundle).provenance["model"] == "moved"


def test_keys_are_the_same_in_every_process(keyed: Keyed) -> None:
    script = """
        import sys
        from pathlib import Path
        from tests.compiler.pipeline.test_pipeline import Keyed
        keyed = object.__new__(Keyed)
        from tests.toy import Toy
        Toy.verifies = True
        from llmc.artifacts.store.store import Store
        from llmc.compiler.targets.base import Shape
        folder = Path(sys.argv[1])
        keyed.toy, keyed.shape = Toy(folder / "toy", Store(folder / sys.argv[2]), folder), Shape("decode", 2, 1, 16)
        print(keyed.key().digest)
    """
    assert finish(child(script, keyed.folder, "fresh")) == keyed.key().digest
