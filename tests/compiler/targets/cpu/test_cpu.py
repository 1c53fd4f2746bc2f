"""CPU through ONNX Runtime, end to end: a tiny llama with grouped queries, one executable for all shapes or each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto

from llmc.artifacts.bundle.manifest import Manifest, read_manifest
from llmc.artifacts.bundle.reader import blob_path
from llmc.artifacts.digest import parse
from llmc.artifacts.store.store import Store
from llmc.buckets.bucket import Bucket
from llmc.buckets.coverage import prove
from llmc.buckets.limits import Limits
from llmc.buckets.plan import Plan, Provenance
from llmc.cli.main import main
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import CompileResult, ExecutableReport, compile_bundle
from llmc.compiler.stages import StageReport
from llmc.compiler.verification.limits import limits
from llmc.compiler.verification.verify import kl_divergence, summarise
from llmc.errors import ArtifactError, InputError, VerificationError
from llmc.runtime.bundle import Bundle
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.executors import open_executor
from llmc.runtime.executors.onnxruntime import executables
from llmc.runtime.executors.onnxruntime import executor as onnxruntime_cpu
from llmc.runtime.executors.onnxruntime.executables import LOGIT_ROWS
from llmc.runtime.llm import BundleLLM
from llmc.runtime.step import exact, pad
from tests.artifacts.helpers import child, finish
from tests.compiler import tiny
from tests.compiler.checkpoint import writers
from tests.manifests import edit_manifest
from tests.tiers import default_cases

CASE = "llama"
LENGTH, SEQUENCES, CHUNK = 48, 8, 16
PRODUCED = 7
GREEDY = SamplingParams(max_tokens=PRODUCED, temperature=0, ignore_eos=True)
LENGTHS = (9, 1, 26, 41, 3, 16, 17, 33)
"""Of prompts: shorter than a chunk, a chunk, one token more, several chunks."""

PROMPT = [
    (1, 16, 0), (2, 8, 0), (4, 4, 0), (8, 2, 0), (1, 8, 32), (2, 8, 40), (4, 4, 40), (1, 16, 40),
]  # fmt: skip
DECODE = [(1, 16), (1, 47), (2, 47), (4, 24), (4, 47), (8, 47)]
BUCKETS = len(PROMPT) + len(DECODE)

SPECIALISED: dict[str, Any] = {"quantize": "none", "specialise": True}
EXACT: dict[str, Any] = {"quantize": "none", "specialise": False}
EITHER = pytest.mark.parametrize("options", [EXACT, SPECIALISED], ids=["exact", "specialised"])


def plan(
    prompt: list[tuple[int, int, int]] = PROMPT, decode: list[tuple[int, int]] = DECODE, chunk: int = CHUNK
) -> Plan:
    """At most 8 sequences of 48 tokens, prompts in steps of at most 16 padded tokens."""
    buckets = [Bucket("prompt", *sizes) for sizes in prompt] + [Bucket("decode", b, 1, c) for b, c in decode]
    created = Plan(Limits(LENGTH, SEQUENCES, chunk, 8), tuple(buckets), Provenance("test"))
    assert not prove(created.limits, created.buckets), prove(created.limits, created.buckets)
    return created


@dataclass
class Workshop:
    """A tiny model, and a store in which what is alike is compiled once."""

    folder: Path
    model: Path
    store: Store

    def compile(
        self, where: Path | None = None, plan_: Plan | None = None, **options: Any
    ) -> tuple[Path, CompileResult, set[str]]:
        """The bundle, the outcome, and the names of what was not in the store."""
        built: set[str] = set()

        def keep(event: object) -> None:
            if isinstance(event, StageReport) and event.seconds is not None and not event.cached:
                built.add(event.name)
            if isinstance(event, ExecutableReport) and not event.cached:
                built.add(str(event.shape))

        requested = CompileOptions.of(**{"device": "onnxruntime", "verify": "all", "jobs": 2, **options})
        path = where or self.folder / "-".join(str(v) for v in options.values())
        result = compile_bundle(str(self.model), path, plan_ or plan(), requested, self.store, keep)
        return path, result, built


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    folder = tmp_path_factory.mktemp("cpu")
    return Workshop(folder, tiny.write_model(folder / CASE, CASE), Store(folder / "store"))


@pytest.fixture(scope="module")
def references() -> list[list[int]]:
    """What the transformers model alone answers to each of `prompts()`."""
    return [tiny.greedy(CASE, prompt, PRODUCED)[: LENGTH - len(prompt)] for prompt in prompts()]


def prompts() -> list[list[int]]:
    random = np.random.default_rng(3)
    return [random.integers(0, 256, length).tolist() for length in LENGTHS]


def generate(bundle: Path, ids: list[list[int]]) -> list[list[int]]:
    with BundleLLM(bundle, threads=1) as llm:
        outputs = llm.generate(ids, GREEDY)
        assert llm.compilations == 0
    return [output.outputs[0].token_ids for output in outputs]


def edited(bundle: Path, copy: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a bundle whose manifest was changed."""
    shutil.copytree(bundle, copy)
    edit_manifest(copy, change)
    return copy


def external(manifest: Manifest, bundle: Path) -> list[list[TensorProto]]:
    """For each executable, its tensors that lie outside."""
    models = [ModelProto.FromString(blob_path(bundle, e.blob).read_bytes()) for e in manifest.executables]
    return [[t for t in m.graph.initializer if t.data_location == TensorProto.EXTERNAL] for m in models]


# Numbers


@default_cases(1)
@EITHER
def test_float32_generates_what_transformers_does_alone_and_in_ragged_batches(
    workshop: Workshop, references: list[list[int]], options: dict[str, Any]
) -> None:
    bundle, result, _ = workshop.compile(**options)
    ids = prompts()
    assert generate(bundle, ids[3:4]) == references[3:4]
    with BundleLLM(bundle, threads=1) as llm:
        for size in range(1, SEQUENCES + 1):
            group = [(3 * size + i) % len(ids) for i in range(size)]
            created = [o.outputs[0].token_ids for o in llm.generate([ids[i] for i in group], GREEDY)]
            assert created == [references[i] for i in group], f"a batch of {size}"
        assert llm.compilations == 0
    found = result.verification
    assert (found["buckets"], found["top1"]) == (BUCKETS, 1.0)
    assert found["greedy_equal"] == found["greedy_sequences"] > 0
    assert found["mean_kl"] < 1e-9 and found["leak"] == 0.0


@EITHER
def test_more_prompts_than_sequences_wait_their_turn(
    workshop: Workshop, references: list[list[int]], options: dict[str, Any]
) -> None:
    bundle, _, _ = workshop.compile(**options)
    assert generate(bundle, prompts() + prompts()[:3]) == references + references[:3]


@EITHER
def test_long_prompts_are_prefilled_in_chunks_that_keep_the_limit(
    workshop: Workshop, references: list[list[int]], options: dict[str, Any]
) -> None:
    """A prompt of 41 tokens, at most 16 a step, by itself and beside others that are chunked, too."""
    narrow = plan([(1, 16, 0), (1, 8, 40), (2, 8, 40)], [(1, 47), (8, 47)])
    bundle, _, _ = workshop.compile(workshop.folder / f"narrow-{options['specialise']}", narrow, **options)
    chunked = [3, 7, 2]
    for group in ([3], chunked):
        with BundleLLM(bundle, threads=1, keep_steps=True) as llm:
            outputs = llm.generate([prompts()[i] for i in group], GREEDY)
        assert [o.outputs[0].token_ids for o in outputs] == [references[i] for i in group]
        prefills = [[s for s in o.steps if s.phase == "prompt"] for o in outputs]
        assert all(len(steps) >= -(-LENGTHS[i] // CHUNK) for i, steps in zip(group, prefills, strict=True))
        assert all(s.batch * s.query <= CHUNK for steps in prefills for s in steps)
    rows = {s.live_rows for steps in prefills for s in steps if s.context}
    assert max(rows) == (2 if options["specialise"] else 1), "a chunk of several prompts over their pasts is one step"


def test_the_chunks_that_run_fastest_change_no_answer(
    workshop: Workshop, references: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An executor may ask for smaller chunks than the limit allows."""
    bundle, _, _ = workshop.compile(**EXACT)
    monkeypatch.setattr(onnxruntime_cpu, "PROMPT_CHUNK", 7)
    with BundleLLM(bundle, threads=1, keep_steps=True) as llm:
        outputs = llm.generate(prompts(), GREEDY)
    assert [o.outputs[0].token_ids for o in outputs] == references
    assert [s.query for s in outputs[3].steps if s.phase == "prompt"] == [7, 7, 7, 7, 7, 6]


def test_prompts_together_in_a_bucket_built_for_a_past_need_not_have_one(
    workshop: Workshop, references: list[list[int]]
) -> None:
    """The only bucket for two prompts has a context; its executable takes one row."""
    sparse = plan([(1, 16, 0), (2, 8, 40)], [(8, 47)])
    bundle, _, _ = workshop.compile(workshop.folder / "sparse", sparse, **SPECIALISED)
    with BundleLLM(bundle, threads=1, keep_steps=True) as llm:
        outputs = llm.generate([prompts()[i] for i in (1, 4)], GREEDY)
        assert {(s.batch, s.context) for s in outputs[0].steps if s.phase == "prompt"} == {(2, 40)}
    assert [o.outputs[0].token_ids for o in outputs] == [references[i] for i in (1, 4)]


@pytest.mark.parametrize("specialise", [False, True])
def test_int8_stays_close_to_float32(workshop: Workshop, specialise: bool) -> None:
    bundle, result, _ = workshop.compile(quantize="int8", specialise=specialise)
    found = result.verification
    bf16 = Bundle.open(bundle).manifest.options.get("kv_cache_dtype") == "bf16"  # where the CPU has tiles of it
    assert found["limits"]["mean_kl"] == (0.03 if bf16 else 0.02)
    assert 0 < found["mean_kl"] < 0.01
    if not specialise:  # beside the bundle's own verification
        assert 0 < divergence(bundle) < 0.01


def test_few_rows_may_differ_by_chance_and_many_may_not() -> None:
    """The limit of 85% top-1 agreement holds for many rows; none may differ where the limit is all of them."""

    def outcome(rows: int, equal: float, kl: float = 1e-3) -> list[dict[str, Any]]:
        right = [i < round(rows * equal) for i in range(rows)]
        one = {"bucket": "b", "runs": 1, "executables": ["any"], "longest": 9, "max_abs": 0.0, "leak": 0.0}
        return [{**one, "kl": [kl] * rows, "equal": right}]

    close, same = limits("int8", "f32"), limits("none", "f32")
    assert summarise(outcome(25, 0.80), close).top1 == 0.8
    for rows, equal, kl, limit in ((400, 0.80, 1e-3, close), (25, 0.6, 1e-3, close), (25, 0.96, 0.0, same)):
        with pytest.raises(VerificationError, match="top-1 agreement"):
            summarise(outcome(rows, equal, kl), limit)


def test_int8_matrices_take_less_than_half_of_float32(workshop: Workshop) -> None:
    """Without the packed copies, of which a tiny model with its small blocks has as much again."""

    def plain(**options: Any) -> int:
        path, _, _ = workshop.compile(**options)
        (tensors,) = external(read_manifest(path), path)
        offsets = [{e.key: e.value for e in t.external_data} for t in tensors]
        return sum({p["offset"]: int(p["length"]) for p in offsets}.values())

    parameters = {id(p): p.numel() for p in tiny.model(CASE).parameters()}
    tables = 2 * 64 * 8
    assert plain(**EXACT) == 4 * (sum(parameters.values()) + tables)
    assert plain(quantize="int8", specialise=False) < plain(**EXACT) / 2


# Blocks of 4 bits, and those of the checkpoint itself


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of every block type: one fused matrix with two of them, one where a matrix has none."""
    types = {
        "embed_tokens": "Q8_0", "0.self_attn.v_proj": "F16", "0.self_attn": "Q4_0", "1.self_attn.v_proj": "Q8_0",
        "self_attn": "Q4_1", "0.mlp.down": "Q4_0", "mlp": "Q4_1",
    }  # fmt: skip
    scaled = {n: t * np.float32(0.15 if t.ndim == 2 else 1) for n, t in writers.weights().items()}
    return writers.write_gguf(tmp_path_factory.mktemp("gguf") / "mixed.gguf", scaled, types=types)


@default_cases("keep-False")
@pytest.mark.parametrize("specialise", [False, True])
@pytest.mark.parametrize("quantize", ["keep", "int4"])
def test_blocks_of_the_checkpoint_are_kept_exactly(
    workshop: Workshop, gguf: Path, tmp_path: Path, quantize: str, specialise: bool
) -> None:
    """What is left is the rounding of activations to 8 bits; int4 keeps what has 4 bits, and makes nothing worse."""
    there = Workshop(tmp_path, gguf, workshop.store)
    _, result, _ = there.compile(quantize=quantize, specialise=specialise)
    assert 0 < result.verification["mean_kl"] < (2e-3 if quantize == "keep" else 2e-2)


@pytest.mark.parametrize("requested", ["--specialise", "--kernels=onnxruntime"])
def test_the_command_packs_kept_blocks_as_the_runtime_of_this_version_opens_them(
    workshop: Workshop, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requested: str
) -> None:
    monkeypatch.setenv("LLMC_CACHE_DIR", str(workshop.folder / "store"))
    bundle = str(tmp_path / "bundle")
    limits_ = ["--max-model-len", "48", "--max-num-seqs", "1", "--prompt-seq", "16,16,16", "--decode-seq", "48,48,48"]
    assert (
        main(["compile", str(gguf), "--device", "onnxruntime", "--quantize", "keep", requested, *limits_, "-o", bundle])
        == 0
    )
    assert main(["generate", bundle, "--prompt", "ab", "--max-tokens", "4"]) == 0


def test_keeping_blocks_of_a_checkpoint_without_any_is_refused_with_what_can_be_done(workshop: Workshop) -> None:
    with pytest.raises(InputError) as refused:
        workshop.compile(quantize="keep")
    message = str(refused.value)
    assert f"--quantize keep: {workshop.model} has no quantized matrix to keep" in message
    assert "--quantize int8 or int4" in message and "GGUF Q2_K to Q8_0" in message


def divergence(bundle: Path) -> float:
    """Mean KL to float32, teacher-forced token by token."""
    text = prompts()[3]
    executor = open_executor(Bundle.open(bundle), threads=1)
    got = np.stack([executor.run(exact("decode", [0], [[t]], [at]))[0].copy() for at, t in enumerate(text)])
    executor.close()
    return float(np.mean([kl_divergence(w, g) for w, g in zip(tiny.logits(CASE, text), got, strict=True)]))


def test_int4_of_a_float_checkpoint_is_smaller_than_int8_and_close_enough(workshop: Workshop) -> None:
    """Without verification: a model of random weights has many tokens that are nearly the best."""
    four, eight = (
        workshop.compile(quantize=q, specialise=False, verify=v)[0] for q, v in (("int4", "none"), ("int8", "all"))
    )
    assert divergence(eight) < divergence(four) < 0.15
    sizes = [sum(int(e.value) for t in external(read_manifest(b), b)[0] for e in t.external_data if e.key == "length")
             for b in (four, eight)]  # fmt: skip
    assert sizes[0] < sizes[1]


# What a bundle is


def test_the_default_is_int8_and_one_executable_for_every_shape(workshop: Workshop) -> None:
    path, result, _ = workshop.compile(workshop.folder / "default")
    manifest = read_manifest(path)
    assert (result.built + result.reused, result.native, result.portable, result.remaining) == (1, 1, 0, "")
    assert not result.specialised
    (only,) = manifest.executables
    assert (only.phase, only.batch, only.query, only.context, only.buckets) == ("any", None, None, None, BUCKETS)
    assert manifest.options["quantize"] == "int8"
    assert manifest.options["static_dims"] == []
    assert manifest.options["choice"] == result.choice
    assert "one executable for all buckets" in result.choice
    assert set(manifest.toolchain) == {"onnxruntime", "onnx"}
    assert manifest.isa


def test_specialised_is_one_executable_a_shape_and_the_manifest_says_that_it_was_requested(workshop: Workshop) -> None:
    path, result, _ = workshop.compile(**SPECIALISED)
    manifest = read_manifest(path)
    assert result.specialised
    assert manifest.options["static_dims"] == ["batch", "query", "context"]
    assert "one executable per bucket" in result.choice == manifest.options["choice"]
    assert "--specialise" in result.choice
    rows = [(1 if context else batch, query, context) for batch, query, context in PROMPT]
    expected = {("prompt", *sizes) for sizes in rows} | {("decode", batch, 1, context) for batch, context in DECODE}
    assert {(e.phase, e.batch, e.query, e.context) for e in manifest.executables} == expected
    assert sum(e.buckets for e in manifest.executables) == BUCKETS


def test_specialised_executables_share_one_file_of_weights_that_counts_once(workshop: Workshop) -> None:
    path, result, _ = workshop.compile(**SPECIALISED)
    manifest = read_manifest(path)
    weights = manifest.files["weights"]
    for tensors in external(manifest, path):
        locations = {e.value for t in tensors for e in t.external_data if e.key == "location"}
        assert locations == {parse(weights)}
    assert result.weights_bytes == manifest.blobs[weights] == blob_path(path, weights).stat().st_size
    assert result.bytes == sum(manifest.blobs.values()) == manifest.size
    assert result.bytes < result.weights_bytes + len(manifest.executables) * 10_000 + 50_000
    blobs = [file for file in (path / "blobs").rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in blobs) == result.bytes


def test_every_executable_of_a_specialised_bundle_opens(workshop: Workshop) -> None:
    path, _, _ = workshop.compile(**SPECIALISED)
    executor = open_executor(Bundle.open(path), threads=1)
    assert executor.memory()["open_executables"] == 0
    executor.open_all()
    assert executor.memory()["open_executables"] == len(read_manifest(path).executables)
    executor.close()
    assert executor.memory()["open_executables"] == 0


def test_an_executable_that_does_not_open_is_an_artifact_error_that_names_it(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _, _ = workshop.compile(**EXACT)

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(executables, "open_session", refuse)
    with pytest.raises(ArtifactError, match=r"ONNX Runtime cannot open any: no such kernel"):
        BundleLLM(path, threads=1)


# What is compiled again


def test_one_more_bucket_builds_one_executable_and_verifies_it_alone(workshop: Workshop) -> None:
    workshop.compile(**SPECIALISED)
    grown = plan(decode=[*DECODE, (3, 40)])
    path, result, built = workshop.compile(workshop.folder / "grown", grown, **SPECIALISED)
    assert result.built == 1
    assert built == {"decode batch=3 query=1 context=40", "verify"}
    assert result.verification["buckets"] == BUCKETS + 1
    assert len(read_manifest(path).executables) == result.built + result.reused


def test_a_second_compile_builds_nothing(workshop: Workshop) -> None:
    for options in (EXACT, SPECIALISED):
        workshop.compile(**options)
        _, result, built = workshop.compile(**options)
        assert (result.built, built) == (0, set())


def test_specialising_uses_the_trace_and_the_weights_of_the_ordinary_bundle(workshop: Workshop) -> None:
    workshop.compile(**EXACT)
    fresh = Workshop(workshop.folder, workshop.model, Store(workshop.folder / "store"))
    _, _, built = fresh.compile(workshop.folder / "fresh", plan(decode=[(8, 47)]), **SPECIALISED)
    assert not built & {"lower", "weights", "tokenizer", "reference"}


def test_a_longer_limit_makes_longer_position_tables(workshop: Workshop) -> None:
    long = Plan(Limits(100, 1, 100, 4), (Bucket("prompt", 1, 100, 0), Bucket("decode", 1, 1, 100)), Provenance("test"))
    path, _, built = workshop.compile(workshop.folder / "long", long, **EXACT)
    assert "lower" in built
    prompt = np.random.default_rng(5).integers(0, 256, 90).tolist()
    assert generate(path, [prompt]) == [tiny.greedy(CASE, prompt, PRODUCED)]


# Never compiling while serving


def test_a_session_that_opens_after_ready_is_counted(workshop: Workshop) -> None:
    path, _, _ = workshop.compile(**SPECIALISED)
    with BundleLLM(path, threads=1) as llm:
        llm.generate([[1, 2, 3]], GREEDY)
        assert llm.compilations == 0, "opening what was compiled is none, while not all is open"
        llm.executor.open_all()
        llm.executor.compilations.ready()
        llm.generate([[1, 2, 3]], GREEDY)
        assert llm.compilations == 0
        for held in (llm.executor._bound, llm.executor._executables._sessions):  # type: ignore[attr-defined]
            held.clear()
        llm.generate([[1, 2, 3]], GREEDY)
        assert llm.compilations == llm.engine.stats.compilations == len(set(llm.executor.compilations.compiled)) > 0


def test_executables_that_are_not_final_are_counted_as_compilations(workshop: Workshop, tmp_path: Path) -> None:
    def portable(manifest: dict[str, Any]) -> None:
        for executable in manifest["executables"]:
            executable["state"] = "portable"

    path, _, _ = workshop.compile(**EXACT)
    with BundleLLM(edited(path, tmp_path / "portable", portable), threads=1) as llm:
        llm.generate([[1, 2, 3]], GREEDY)
        assert llm.compilations == 1
    path, _, _ = workshop.compile(**SPECIALISED)
    with BundleLLM(edited(path, tmp_path / "portable too", portable), threads=1) as llm:
        llm.executor.open_all()
        assert llm.compilations == len(read_manifest(path).executables)


@EITHER
def test_a_server_counts_no_compilation_from_opening_to_closing(workshop: Workshop, options: dict[str, Any]) -> None:
    path, _, _ = workshop.compile(**options)
    with BundleLLM(path, threads=1) as llm:
        llm.executor.open_all()
        llm.generate(prompts(), GREEDY)
        assert llm.compilations == 0


# Another host


def test_a_bundle_of_another_onnxruntime_is_refused_with_both_versions_and_the_way_out(
    workshop: Workshop, tmp_path: Path
) -> None:
    path, _, _ = workshop.compile(**EXACT)
    here = read_manifest(path).toolchain["onnxruntime"]
    other = edited(path, tmp_path / "other", lambda m: m["toolchain"].update(onnxruntime="1.2.3"))
    with pytest.raises(ArtifactError) as refused:
        BundleLLM(other)
    message = str(refused.value)
    assert refused.value.exit_code == 5
    assert "compiled with onnxruntime 1.2.3" in message and f"this host has {here}" in message
    assert "onnxruntime==1.2.3" in message
    assert f"llmc compile {workshop.model.name} --device onnxruntime -o {other}" in message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda isa: [*isa, "avx9"], "without avx9"),
        (lambda isa: isa[:-1], "with "),
        (lambda isa: ["riscv64"], "without riscv64"),
    ],
)
def test_a_bundle_of_another_instruction_set_is_refused_and_says_what_differs(
    workshop: Workshop, tmp_path: Path, change: Callable[[list[str]], list[str]], words: str
) -> None:
    path, _, _ = workshop.compile(**EXACT)
    other = edited(path, tmp_path / "other", lambda m: m.update(isa=change(m["isa"])))
    with pytest.raises(ArtifactError, match="compiled for another instruction set") as refused:
        BundleLLM(other)
    assert words in str(refused.value)
    assert f"llmc compile {workshop.model.name} --device onnxruntime -o {other}" in str(refused.value)


# Broken executors never pass


RUN = onnxruntime_cpu.BoundSession.run


def kv(bound: Any) -> list[Any]:
    """The keys and values that a binding reads."""
    return [before for before, _ in bound._cache.values()]


def reads_the_whole_cache(self: Any, inputs: Any, results: Any) -> None:
    """The length mask dropped: every cached position counts, whoever owns it."""
    batch, query = inputs["token_ids"].shape
    RUN(self, {**inputs, "past_lengths": np.full(batch, kv(self)[0].shape[2] - query)}, results)


def takes_the_last_pad(self: Any, inputs: Any, results: Any) -> None:
    """The live length dropped: logits after the last padded token."""
    batch, query = inputs["token_ids"].shape
    RUN(self, {**inputs, LOGIT_ROWS: (np.arange(batch) + 1) * query - 1}, results)


def past_one_short(self: Any, inputs: Any, results: Any) -> None:
    RUN(self, {**inputs, "past_lengths": np.maximum(inputs["past_lengths"] - 1, 0)}, results)


def unused_cache_shifts_logits_a_little(self: Any, inputs: Any, results: Any) -> None:
    length = kv(self)[0].shape[2]
    ends = inputs["past_lengths"] + inputs["token_ids"].shape[1]
    unused = np.arange(length) >= ends[:, None]
    leaked = np.stack([np.where(unused, np.nan_to_num(t[:, 0, :, 0]), 0).sum(1) for t in kv(self)]).sum(0)
    RUN(self, inputs, results)
    results["logits"][: len(inputs[LOGIT_ROWS])] += np.float32(1e-6) * leaked[:, None].astype(np.float32)


BROKEN = [
    (reads_the_whole_cache, EXACT, None),
    (reads_the_whole_cache, SPECIALISED, None),
    (takes_the_last_pad, SPECIALISED, None),
    (past_one_short, EXACT, None),
    (past_one_short, SPECIALISED, None),
    (unused_cache_shifts_logits_a_little, EXACT, "padding leaks into results in"),
    (unused_cache_shifts_logits_a_little, SPECIALISED, "padding leaks into results in"),
]


@default_cases(2)
@pytest.mark.parametrize(
    ("broken", "options", "message"),
    BROKEN,
    ids=[f"{b[0].__name__}-{'specialised' if b[1] is SPECIALISED else 'exact'}" for b in BROKEN],
)
def test_an_executor_that_drops_a_mask_fails_verification(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, broken: Callable[..., None],
    options: dict[str, Any], message: str | None,
) -> None:  # fmt: skip
    workshop.compile(**options, verify="none")
    store = Store(shutil.copytree(workshop.store.root, tmp_path / "store"))
    for entry in store.root.rglob("verify*"):
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    unverified = Workshop(tmp_path, workshop.model, store)
    monkeypatch.setattr(onnxruntime_cpu.BoundSession, "run", broken)
    with pytest.raises(VerificationError, match=message):
        unverified.compile(tmp_path / "bundle", **options)
    assert not (tmp_path / "bundle").exists()


def test_a_leak_in_a_prompt_over_a_past_is_seen_by_its_nan_fill_alone(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What a specialised prompt runs on is not the cache: its unused part must be poisoned, too."""
    path, _, _ = workshop.compile(**SPECIALISED, verify="none")
    executor = open_executor(Bundle.open(path), threads=1)
    seen: list[bool] = []

    def watch(self: Any, inputs: Any, results: Any) -> None:
        past, query = int(inputs["past_lengths"][0]), inputs["token_ids"].shape[1]
        if query > 1 and past:
            seen.append(all(np.isnan(t[0, :, past + query :]).all() for t in kv(self)))
        RUN(self, inputs, results)

    bucket = Bucket("prompt", 1, 16, 40)
    for _ in range(2):  # the staging cache is laid out by the first run
        executor.run(pad(Bucket("prompt", 1, 16, 0), [0], [prompts()[5]], [0]))
        executor.run(pad(bucket, [0], [prompts()[5]], [16]))
    executor.nan_fill(0, 16, float("nan"))
    monkeypatch.setattr(onnxruntime_cpu.BoundSession, "run", watch)
    executor.run(pad(bucket, [0], [prompts()[5][:3]], [16]))
    executor.close()
    assert seen == [True]


# Processes


def test_an_ordinary_bundle_is_compiled_and_opened_after_a_specialised_one_in_one_process(
    workshop: Workshop, tmp_path: Path
) -> None:
    """ONNX Runtime takes one decision about threads for a whole process."""
    path, _, _ = workshop.compile(**SPECIALISED, verify="none")
    script = """
        import sys
        from pathlib import Path
        from llmc.artifacts.store.store import Store
        from llmc.compiler.options import CompileOptions
        from llmc.compiler.pipeline.compile import compile_bundle
        from llmc.runtime.bundle import Bundle
        from llmc.runtime.llm import BundleLLM
        from llmc.runtime.engine.sampling import SamplingParams
        specialised, model, store, other = sys.argv[1:]
        greedy = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
        texts = []
        with BundleLLM(specialised, threads=2) as first:
            texts.append(first.generate([[1, 2, 3]], greedy)[0].outputs[0].token_ids)
            plan = Bundle.open(specialised).plan
            options = CompileOptions("onnxruntime", quantize="none", specialise=False, verify="none", jobs=2)
            result = compile_bundle(model, Path(other), plan, options, Store(store), lambda _: None)
            with BundleLLM(other, threads=1) as second:
                texts.append(second.generate([[1, 2, 3]], greedy)[0].outputs[0].token_ids)
                texts.append(first.generate([[1, 2, 3]], greedy)[0].outputs[0].token_ids)
        assert texts[0] == texts[1] == texts[2], texts
        print(result.built + result.reused)
    """
    store = shutil.copytree(workshop.store.root, tmp_path / "store")
    assert finish(child(script, path, workshop.model, store, tmp_path / "other")) == "1"


FORBIDDEN = ("torch", "transformers", "safetensors", "gguf", "onnx", "huggingface_hub", "sympy")
HOOK = f"""
        import sys

        class Forbid:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in {FORBIDDEN}:
                    raise ImportError(f"{{name}} is not for serving")

        sys.meta_path.insert(0, Forbid())
"""


@EITHER
def test_a_process_that_generates_needs_no_compiler_packages(workshop: Workshop, options: dict[str, Any]) -> None:
    path, _, _ = workshop.compile(**options)
    script = """
        import llmc.cli.main
        assert llmc.cli.main.main(["generate", sys.argv[1], "--prompt", "a river", "--max-tokens", "3"]) == 0
        print([name for name in sys.modules if name.partition(".")[0] in FORBIDDEN])
    """
    out = finish(child(HOOK + script.replace("FORBIDDEN", str(FORBIDDEN)), path))
    assert out.splitlines()[-1] == "[]"


def test_a_compile_that_changes_nothing_imports_no_torch(workshop: Workshop) -> None:
    path, _, _ = workshop.compile(workshop.folder / "unchanged", quantize="int8", specialise=False, verify="sample")
    (workshop.folder / "plan.json").write_text(plan().to_json())
    script = """
        import sys
        import llmc.cli.main
        model, output, plan, store = sys.argv[1:]
        device = ["--device", "onnxruntime"]
        arguments = ["compile", model, *device, "--plan", plan, "-o", output, "--cache-dir", store, "--json"]
        assert llmc.cli.main.main(arguments) == 0
        print([name for name in sys.modules if name in ("torch", "transformers")])
    """
    process = child(script, workshop.model, path, workshop.folder / "plan.json", workshop.store.root)
    result, imported = finish(process).splitlines()
    assert (json.loads(result)["built"], imported) == (0, "[]")
