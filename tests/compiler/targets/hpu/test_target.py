"""Gaudi's first stage on a host without one: portable programs, verified with poison, and replayed on the CPU."""

from __future__ import annotations

import getpass
import io
import json
import re
import socket
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import llmc
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import dry_run
from llmc.compiler.pipeline.resolve import CompileJob
from llmc.compiler.targets import open_target
from llmc.compiler.weights.recipes import Recipe, to_bf16, write_weights
from llmc.errors import ArtifactError, DeviceError, InputError
from llmc.platforms import install_line
from llmc.runtime import portable_program
from llmc.runtime.bundle import Bundle
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.executors import open_executor
from llmc.runtime.executors.torch.executor import TorchExecutor
from llmc.runtime.llm import BundleLLM
from llmc.runtime.portable_program import PortableProgram, read_archive, write_archive
from llmc.runtime.step import pad
from tests.compiler import tiny
from tests.compiler.compiled import Compiled
from tests.tiers import full

CASE = "mistral"
PROMPTS = [[5, 80, 3, 200, 17, 9, 9, 31, 4], list(range(40, 66)), [7], [11, 12]]
GREEDY = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
NAN = float("nan")
REQUESTED = {"device": "hpu", "verify": "all", "jobs": 2}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return Compiled.first(tmp_path_factory.mktemp("hpu"), CASE, tiny.tiny_plan(), REQUESTED)


def test_every_bucket_becomes_a_portable_executable_and_the_summary_says_what_is_left(compiled: Compiled) -> None:
    result, buckets = compiled.result, tiny.tiny_plan().buckets
    assert (result.built, result.portable, result.native) == (len(buckets), len(buckets), 0)
    assert result.specialised
    assert all(word in result.remaining for word in ("Gaudi", "recipe cache", "HPU graph", "warm up"))
    manifest = Bundle.open(compiled.path).manifest
    assert {(e.phase, e.batch, e.query, e.context) for e in manifest.executables} == {
        (b.phase, b.batch, b.query, b.context) for b in buckets
    }
    assert {e.state for e in manifest.executables} == {"portable"}
    assert manifest.options["remaining"] == result.remaining
    assert set(manifest.toolchain) == {"torch", "transformers"}


def test_verification_passes_in_every_bucket_with_nan_filled_padding(compiled: Compiled) -> None:
    found = compiled.result.verification
    assert found["buckets"] == len(tiny.tiny_plan().buckets)
    assert found["rows"] > found["buckets"]
    assert found["mean_kl"] < 1e-8
    assert found["max_abs"] < 1e-3
    assert found["top1"] == 1.0
    assert found["leak"] == 0.0
    assert found["greedy_equal"] == found["greedy_sequences"] > 0


def test_the_bundle_generates_what_transformers_generates_and_compiles_nothing(compiled: Compiled) -> None:
    with BundleLLM(compiled.path, threads=1, keep_steps=True) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
        assert llm.compilations == 0
        memory = llm.executor.memory()
    assert [o.outputs[0].token_ids for o in outputs] == [tiny.greedy(CASE, p, 9) for p in PROMPTS]
    assert memory["weights_mapped"] > 0
    assert memory["open_executables"] <= len(tiny.tiny_plan().buckets)


def test_a_second_compile_builds_nothing(compiled: Compiled) -> None:
    result = compiled.compile(compiled.path)
    assert (result.built, result.reused, compiled.built) == (0, len(tiny.tiny_plan().buckets), set())


def test_a_dry_run_finds_everything_cached_and_builds_nothing(compiled: Compiled) -> None:
    requested = CompileOptions("hpu", verify="all", jobs=2)
    found = dry_run(CompileJob.of(str(compiled.model), tiny.tiny_plan(), requested), compiled.store)
    assert (found["to_build"], found["cached"]) == (0, len(tiny.tiny_plan().buckets))


def test_the_same_model_compiled_elsewhere_gives_the_same_bytes(compiled: Compiled, tmp_path: Path) -> None:
    elsewhere = Compiled.first(tmp_path, CASE, compiled.plan, REQUESTED, verify="none")
    assert elsewhere.blobs() == compiled.blobs()
    mine, other = (Bundle.open(path).manifest for path in (compiled.path, elsewhere.path))
    assert mine.files == other.files
    assert [e.key for e in mine.executables] == [e.key for e in other.executables]


def test_native_executables_are_refused_on_a_host_without_a_gaudi(compiled: Compiled, tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"--require-native.*only portable.*Gaudi host") as refused:
        compiled.compile(tmp_path / "native", require_native=True)
    assert refused.value.exit_code == 3
    assert not (tmp_path / "native").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"specialise": False}, "--no-specialise is not offered for device hpu: HPU graphs are captured and replayed"),
        ({"quantize": "int8"}, "--quantize int8 is not offered for device hpu; offered: none"),
        ({"dtype": "f16"}, "--dtype f16 is not offered for device hpu; offered: f32, bf16"),
    ],
)
def test_what_the_device_does_not_offer_is_a_usage_error(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        open_target("hpu").configure(CompileOptions.of("hpu", **options))  # type: ignore[arg-type]


def test_choosing_the_target_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    import subprocess

    code = (
        "import sys; from llmc.compiler.targets import open_target; t = open_target('hpu'); t.toolchain();"
        "from llmc.runtime.executors import executor_class; executor_class('torch');"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=tmp_path).returncode == 0


# What is in a program ------------------------------------------------------------------------------------------------


def test_weights_are_in_the_bundle_once_and_in_no_program(compiled: Compiled) -> None:
    manifest = Bundle.open(compiled.path).manifest
    parameters = sum(p.numel() for p in tiny.model(CASE).parameters()) * 4
    size = manifest.blobs[manifest.files["weights"]]
    assert parameters <= size < parameters + 64 * 4096
    for data in compiled.blobs():
        assert len(data) < 32_000
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            assert archive.read("archive/data/weights/model_weights_config.json") == b'{"config": {}}'
            assert archive.read("archive/data/sample_inputs/model.pt") == b""
            assert not any(".pt" in n and archive.getinfo(n).file_size for n in archive.namelist())


def test_tensors_start_at_pages_and_a_tied_head_is_stored_once() -> None:
    class Source:
        def tensor_names(self) -> list[str]:
            return ["model.embed_tokens.weight", "model.norm.weight"]

        def tensor(self, name: str) -> np.ndarray:
            return np.full((3, 5), len(name), np.float32)

    names = ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight")
    out = io.BytesIO()
    placed = write_weights([Recipe(n, "bf16", (n,)) for n in names], Source(), {}, out)
    assert [placed[n].offset for n in names] == [0, 0, 4096]
    assert {p.length for p in placed.values()} == {30}
    assert out.getvalue()[4096:] == b"\x88\x41" * 15


def test_rounding_to_bf16_is_torchs() -> None:
    random = np.random.default_rng(0)
    array = (random.standard_normal(4096) * 10.0 ** random.integers(-30, 30, 4096)).astype(np.float32)
    array = np.concatenate([array, np.float32([0.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8, 1e-40, 3.3e38])])
    wanted = torch.from_numpy(array).to(torch.bfloat16).view(torch.uint16).numpy()
    assert np.array_equal(to_bf16(array), wanted)


def test_no_name_of_this_machine_is_in_any_blob(compiled: Compiled) -> None:
    here = {
        str(Path.cwd()),
        str(Path(llmc.__file__).parent.parent),
        str(compiled.model.parent),
        sys.prefix,
        "site-packages",
    }
    here |= {"modeling_mistral", 'stack_trace":"', "torch_fn", str(Path.home()) + "/"}
    here |= {name for name in (socket.gethostname(), getpass.getuser()) if len(name) > 4}
    with Bundle.open(compiled.path).files as files:
        texts = [files.read(name) for name in ("weights.json", *(e.blob for e in files.manifest.executables))]
    for data in texts:
        whole = data
        if zipfile.is_zipfile(io.BytesIO(data)):
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                whole += b"".join(archive.read(name) for name in archive.namelist())
        assert not [name for name in here if name.encode() in whole]


def test_torch_export_loads_a_program_without_unpickling_and_computes_the_same(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pickle

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something was unpickled")

    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr(pickle, "loads", refuse)
    for data in compiled.blobs():
        program = PortableProgram.parse(data)
        exported = torch.export.load(io.BytesIO(data))
        inputs = _random_inputs(exported)
        for mine, theirs in zip(program.run(*inputs), exported.graph_module(*inputs), strict=True):
            assert torch.equal(mine, theirs)


def _random_inputs(exported: torch.export.ExportedProgram) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = []
    for node in exported.graph.nodes:
        if node.op == "placeholder":
            like = node.meta["val"]
            if node.name == "token_ids":
                inputs.append(torch.randint(0, 200, like.shape, generator=generator))
            elif like.dtype == torch.int64:
                inputs.append(torch.ones(like.shape, dtype=torch.int64))
            else:
                inputs.append(torch.rand(like.shape, generator=generator))
    return inputs


# What is refused -----------------------------------------------------------------------------------------------------


def _edited(data: bytes, edit: object) -> bytes:
    program = read_archive(data)
    edit(program)  # type: ignore[operator]
    return write_archive(program)


def _first(program: portable_program.Fields) -> portable_program.Fields:
    node: portable_program.Fields = program["graph_module"]["graph"]["nodes"][0]
    return node


STRING = {"name": "filename", "arg": {"as_string": "/etc/passwd"}, "kind": 1}
EVIL = {
    "another library's operator": lambda p: _first(p).update(target="torch.ops.llmc.attention.default"),
    "a Python function": lambda p: _first(p).update(target="_operator.add"),
    "an attribute that is no operator": lambda p: _first(p).update(target="torch.ops.aten.__class__.mro"),
    "a path through attributes": lambda p: _first(p).update(target="torch.ops.aten.add.Tensor.__globals__"),
    "an operator that writes": lambda p: _first(p).update(target="torch.ops.aten.add_.Tensor"),
    "a random operator": lambda p: _first(p).update(target="torch.ops.aten.bernoulli.default"),
    "a string argument": lambda p: _first(p).update(target="torch.ops.aten.from_file.default", inputs=[STRING]),
    "an unknown argument": lambda p: _first(p)["inputs"].append(STRING | {"arg": {"as_int": 1}}),
    "a value that nothing makes": lambda p: p["graph_module"]["graph"].update(outputs=[{"as_tensor": {"name": "no"}}]),
    "symbols": lambda p: p.update(range_constraints={"s0": {"min_val": 2, "max_val": None}}),
    "code": lambda p: p.update(guards_code=["__import__('os').abort()"]),
    "another schema": lambda p: p.update(schema_version={"major": 99, "minor": 1}),
    "no graph": lambda p: p.pop("graph_module"),
    "unnamed weights": lambda p: p["graph_module"].update(module_call_graph=[]),
}


@pytest.mark.parametrize("what", EVIL)
def test_a_program_that_could_do_more_than_compute_is_refused(what: str, compiled: Compiled) -> None:
    with pytest.raises(ValueError, match=r"."):
        PortableProgram.parse(_edited(compiled.blobs()[0], EVIL[what]))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("archive/data/sample_inputs/model.pt", b"\x80\x02cos\nsystem\n."),
        ("archive/data/weights/model_weights_config.json", b'{"config": {"w": {"use_pickle": true}}}'),
        ("archive/data/constants/opaque_obj_0", b"\x80\x02cos\nsystem\n."),
        ("archive/models/model.json", b"[]"),
        ("archive/models/model.json", b"not JSON"),
    ],
)
def test_an_archive_with_anything_to_unpickle_or_misread_is_refused(
    name: str, content: bytes, compiled: Compiled
) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(compiled.blobs()[0])) as old, zipfile.ZipFile(out, "w") as new:
        for known in old.namelist():
            new.writestr(known, content if known == name else old.read(known))
        if name not in old.namelist():
            new.writestr(name, content)
    with pytest.raises(ValueError, match=r"."):
        PortableProgram.parse(out.getvalue())


@pytest.mark.parametrize("cut", [0, 10, 1000, -1])
def test_a_torn_archive_is_refused(cut: int, compiled: Compiled) -> None:
    with pytest.raises(ValueError, match="not a portable program"):
        PortableProgram.parse(compiled.blobs()[0][:cut])


# The executor --------------------------------------------------------------------------------------------------------


@pytest.fixture
def executor(compiled: Compiled) -> TorchExecutor:
    built = open_executor(Bundle.open(compiled.path), threads=1)
    assert isinstance(built, TorchExecutor)
    for slot in range(built.slots):
        built.nan_fill(slot, 0, NAN)
    return built


def _prefill(executor: TorchExecutor, slots: list[int], prompts: list[list[int]]) -> np.ndarray:
    bucket = executor.bundle.plan.lookup("prompt", 3, max(map(len, prompts)), 0)
    assert bucket is not None
    return executor.run(pad(bucket, slots, prompts, [0] * len(slots)))[: len(slots)].copy()


def _decode(executor: TorchExecutor, tokens: list[int], past: list[int]) -> np.ndarray:
    bucket = executor.bundle.plan.lookup("decode", len(tokens), 1, max(past))
    assert bucket is not None
    return executor.run(pad(bucket, range(len(tokens)), [[t] for t in tokens], past))[: len(tokens)].copy()


def test_rows_may_lie_in_any_slots(executor: TorchExecutor) -> None:
    prompts = [[3, 4, 5, 6], [9, 8]]
    logits = _prefill(executor, [2, 0], prompts)
    for row, prompt in zip(logits, prompts, strict=True):
        assert np.abs(row - tiny.logits(CASE, prompt)[-1]).max() < 1e-4
    executor.copy_prefix(2, 1, 4)
    for row, sequence in zip(_decode(executor, [50, 60], [2, 4]), ([9, 8, 50], [3, 4, 5, 6, 60]), strict=True):
        assert np.abs(row - tiny.logits(CASE, sequence)[-1]).max() < 1e-4
    chunk = next(b for b in executor.bundle.plan.prompt if b.context)
    got = executor.run(pad(chunk, [2], [[70, 71, 72]], [4]))[0]
    assert np.abs(got - tiny.logits(CASE, [3, 4, 5, 6, 70, 71, 72])[-1]).max() < 1e-4


def test_a_step_keeps_only_live_tokens_of_live_rows(executor: TorchExecutor) -> None:
    _prefill(executor, [1], [[3, 4, 5]])
    whole = torch.stack(executor._cache._kept)
    assert torch.isnan(whole[:, [0, 2]]).all()
    assert torch.isnan(whole[:, 1, :, 3:]).all()
    assert not torch.isnan(whole[:, 1, :, :3]).any()


def test_a_prefix_goes_out_and_into_another_executor(executor: TorchExecutor, compiled: Compiled) -> None:
    _prefill(executor, [0], [[3, 4, 5]])
    prefix = executor.export_prefix(0, 3)
    assert [p.shape for p in prefix] == [(2, 3, 16)] * 4
    other = open_executor(Bundle.open(compiled.path), threads=1)
    other.import_prefix(0, prefix)
    assert isinstance(other, TorchExecutor)
    assert np.array_equal(_decode(other, [9], [3]), _decode(executor, [9], [3]))
    for mine, theirs in zip(executor.export_prefix(0, 4), other.export_prefix(0, 4), strict=True):
        assert np.array_equal(mine, theirs)
    prefix[0][:] = 0  # copies: the cache is not changed
    assert executor.export_prefix(0, 3)[0].any()


@pytest.mark.parametrize(
    ("past", "new", "slots", "message"),
    [
        ([0], [17], [0], "new lengths"),
        ([0], [0], [0], "new lengths"),
        ([3], [1], [0], "past lengths"),
        ([0], [1], [9], "do not fit"),
        ([0, 0], [1, 1], [0, 0], "share a slot|do not fit"),
    ],
)
def test_steps_that_no_cache_can_serve_are_refused(
    past: list[int], new: list[int], slots: list[int], message: str, executor: TorchExecutor
) -> None:
    bucket = next(b for b in executor.bundle.plan.prompt if not b.context)
    step = pad(bucket, [0], [[1]], [0])
    step.past_lengths[: len(past)] = past[: bucket.batch]
    step.new_lengths[: len(new)] = new[: bucket.batch]
    object.__setattr__(step, "slots", tuple(slots))
    with pytest.raises(InputError, match=message):
        executor.run(step)


def test_a_past_that_was_never_cached_is_refused(executor: TorchExecutor) -> None:
    with pytest.raises(InputError, match="slot 0 holds 0 tokens, not 2"):
        _decode(executor, [5], [2])
    with pytest.raises(InputError, match="holds 0 tokens"):
        executor.export_prefix(1, 1)
    with pytest.raises(InputError, match="do not fit"):
        executor.import_prefix(0, [np.zeros((2, 3, 16), np.float32)])


def test_programs_open_when_needed_or_all_at_once(executor: TorchExecutor) -> None:
    buckets = executor.bundle.plan.buckets
    assert executor.memory()["open_executables"] == 0
    executor.warm([(b.phase, b.batch, b.query, b.context) for b in buckets[:2]])
    assert executor.memory()["open_executables"] == 2
    executor.open_all()
    assert executor.memory()["open_executables"] == len(buckets)
    executor.close()
    assert executor.memory() == {"cache": 0, "weights_mapped": 0, "open_executables": 0}


def test_a_shape_that_was_not_compiled_is_an_artifact_error(executor: TorchExecutor) -> None:
    with pytest.raises(ArtifactError, match=r"no executable for prompt batch 1, query 999.*llmc compile"):
        executor.warm([("prompt", 1, 999, 0)])


def _with_manifest(compiled: Compiled, **members: object) -> Bundle:
    bundle = Bundle.open(compiled.path)
    bundle.files.manifest = bundle.manifest.changed(**members)
    return bundle


def test_another_release_of_torch_is_refused_and_another_patch_is_not(compiled: Compiled) -> None:
    with pytest.raises(ArtifactError, match=r"compiled with torch 2\.1\.0, this host has .*install torch==2\.1\.\*"):
        open_executor(_with_manifest(compiled, toolchain={"torch": "2.1.0"}))
    major, minor, *_ = torch.__version__.split(".")
    open_executor(_with_manifest(compiled, toolchain={"torch": f"{major}.{minor}.77+hpu"}), threads=1).close()


def test_a_host_without_torch_is_reported_what_to_install(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(
        DeviceError, match=rf"torch, which is not installed; install it with: {re.escape(install_line('compile'))}"
    ):
        open_executor(Bundle.open(compiled.path))


def test_weights_that_do_not_fit_their_file_are_refused(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = Bundle.open(compiled.path)
    placements = json.loads(bundle.files.read("weights.json"))
    name = next(iter(placements))
    whole = bundle.files.read
    for field, value in (
        ("offset", 1 << 40),
        ("offset", -4096),
        ("shape", [1, 1]),
        ("dtype", "object"),
        ("length", "x"),
    ):
        broken = placements | {name: placements[name] | {field: value}}
        text = json.dumps(broken).encode()
        monkeypatch.setattr(bundle.files, "read", lambda n, text=text: text if n == "weights.json" else whole(n))
        with pytest.raises(ArtifactError, match="weight"):
            open_executor(bundle, threads=1).warm([(b.phase, b.batch, b.query, b.context) for b in bundle.plan.buckets])


# bf16 ----------------------------------------------------------------------------------------------------------------


@full
def test_bf16_halves_the_weights_and_stays_within_its_limits(tmp_path: Path) -> None:
    case, path = tiny.TIED, tmp_path / "bundle"
    result = Compiled.first(tmp_path, case, tiny.tiny_plan(), REQUESTED, dtype="bf16").result
    parameters = sum(p.numel() for p in tiny.model(case).parameters())
    assert 2 * parameters <= result.weights_bytes < 2 * parameters + 64 * 4096
    assert result.verification["limits"]["mean_kl"] > 1e-5
    assert 0 < result.verification["mean_kl"] < 0.02
    assert result.verification["leak"] == 0.0
    bundle = Bundle.open(path)
    placements = json.loads(bundle.files.read("weights.json"))
    assert {p["dtype"] for n, p in placements.items() if n.endswith(("weight", "bias"))} == {"bfloat16"}
    assert placements["model.rotary_emb.inv_freq"]["dtype"] == "float32"
    with BundleLLM(bundle, threads=1) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
        values = 2 * llm.executor.slots * 2 * llm.executor.capacity * 16  # tensors · slots · heads · tokens · head size
        assert llm.executor.memory()["cache"] == 2 * values
    assert all(len(o.outputs[0].token_ids) == 9 for o in outputs)
