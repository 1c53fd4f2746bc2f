"""The library's build, the layout's own checks, and what a compile makes of both."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llmc.artifacts.bundle.kernel_sets import KERNEL_SETS, best_set, sets_in
from llmc.artifacts.bundle.reader import blob_path
from llmc.artifacts.bundle.trust import code_of_entry
from llmc.artifacts.key import Key
from llmc.artifacts.store.store import Store
from llmc.buckets.limits import Limits
from llmc.compiler.options import CompileOptions, UnfitError
from llmc.compiler.pipeline.compile import CompileResult, compile_bundle
from llmc.compiler.targets import open_target
from llmc.compiler.targets.onnxruntime import options as kernel_options
from llmc.compiler.targets.onnxruntime import target as onnxruntime
from llmc.compiler.targets.onnxruntime.kernels import build as kernels
from llmc.compiler.targets.onnxruntime.kernels.panels import PARTS, Panels, to_float16
from llmc.compiler.targets.onnxruntime.options import KEPT, require_heads
from llmc.compiler.weights.recipes import quantise_q8
from llmc.errors import ArtifactError, CheckpointError, CompileError, InputError, UnknownNameError
from llmc.runtime.bundle import Bundle
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.executors import compatibility, open_executor
from llmc.runtime.executors.base import Executor
from llmc.runtime.llm import BundleLLM
from llmc.runtime.step import exact, ragged
from llmc.testing.toy import toy_plan
from tests.compiler import tiny
from tests.compiler.checkpoint.writers import write_gguf
from tests.compiler.targets.onnxruntime.kernels.host import own_set
from tests.manifests import edit_manifest
from tests.tiers import default_cases, full

PLAN = toy_plan([(1, 32, 0), (4, 8, 40)], [(1, 47), (4, 47)], Limits(48, 4, 32, 8))
ISA = KERNEL_SETS[0].isa
BLOCKS = {"embed_tokens": "Q8_0", "_proj": "Q4_1"}
X86 = [s.name for s in KERNEL_SETS if s.machine == "x86_64"]


def compile_with(model: Path, folder: Path, **options: Any) -> tuple[CompileResult, Path]:
    requested = CompileOptions.of(**{"device": "onnxruntime", "verify": "all", **options})
    path = folder / "bundle"
    return compile_bundle(str(model), path, PLAN, requested, Store(folder / "store"), lambda event: None), path


@pytest.fixture(scope="module")
def bundle(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle")
    return compile_with(tiny.write_model(folder / "model", "llama"), folder, quantize="int8", sample_top_k=4)[1]


@pytest.fixture
def executor(bundle: Path) -> Executor:
    return open_executor(Bundle.open(bundle), 6, 2)


# The build


@full
def test_the_same_source_makes_the_same_bytes(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZIG_GLOBAL_CACHE_DIR")
    assert kernels.build(tmp_path, own_set().name).read_bytes() == library.read_bytes()


@full
@pytest.mark.parametrize("name", [s.name for s in KERNEL_SETS])
def test_the_library_of_a_set_needs_no_other(name: str, tmp_path: Path) -> None:
    library = kernels.build(tmp_path, name)
    if name in X86:
        ctypes.CDLL(str(library), mode=os.RTLD_NOW).RegisterCustomOps  # noqa: B018 - it is there, and all it takes
    assert b"RegisterCustomOps" in library.read_bytes()
    assert b".so" not in library.read_bytes(), "no name of a library to load"


def test_what_the_c_compiler_says_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "broken.c").write_text("int f(void) { return nothing; }\n")
    monkeypatch.setattr(kernels, "SOURCE", source)
    with pytest.raises(CompileError, match=r"the kernels do not compile: broken\.c:1.*nothing"):
        kernels.build(tmp_path, "avx2")


def test_a_c_compiler_that_cannot_run_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(CompileError, match="the kernels' C compiler cannot run"):
        kernels.build(tmp_path, "avx2")


# The layout


def blocks(value: float) -> tuple[Any, Any, Any]:
    quantized, scales = quantise_q8(np.full((16, 32), value, np.float32), 32)
    return quantized, scales, np.zeros_like(scales)


def test_weights_too_large_for_their_scales_are_refused() -> None:
    with pytest.raises(
        UnfitError, match="big: weights are too large for the float16 scales of llmc's kernels; use --k"
    ):
        Panels(["big"], 8, *blocks(1e6))["panels"]
    assert len(Panels(["fits"], 8, *blocks(3e4))["panels"])


def test_offsets_that_the_graph_does_not_know_of_are_refused() -> None:
    quantized, scales, offsets = blocks(1.0)
    with pytest.raises(CheckpointError, match="w has offsets now: the checkpoint changed; compile again"):
        Panels(["w"], 8, quantized, scales, offsets + 1)["panels"]


def test_zero_points_that_are_none_are_refused() -> None:
    quantized, scales, _ = blocks(1.0)
    assert len(Panels(["w"], 8, quantized, scales, 3 * scales)["panels+zeros"])
    with pytest.raises(CheckpointError, match="w has no whole zero points: the checkpoint changed; compile again"):
        Panels(["w"], 8, quantized, scales, scales / 2)["panels+zeros"]


def test_a_part_that_is_none_is_a_key_error() -> None:
    held = Panels(["w"], 8, *blocks(1.0))
    assert tuple(held) == PARTS and len(held) == len(PARTS)
    with pytest.raises(KeyError):
        held["rows"]


def test_small_scales_keep_eleven_bits() -> None:
    scales = np.geomspace(3e-7, 100, 50).astype(np.float32)
    assert (np.abs(to_float16(scales) / scales - 1) < 2**-11).all()


@pytest.mark.parametrize("wide", [{"head_dim": 513}, {"value_dim": 513}], ids=str)
def test_heads_that_the_kernel_does_not_take_are_named(wide: dict[str, int]) -> None:
    fits = {"head_dim": 512, "value_dim": 512}
    require_heads(fits)
    with pytest.raises(UnfitError, match=r"attention of heads 513 wide: .* at most 512 .*use --kernels onnxruntime"):
        require_heads(fits | wide)


# Options


def configured(monkeypatch: pytest.MonkeyPatch, isa: tuple[str, ...], **options: Any) -> CompileOptions:
    monkeypatch.setattr(onnxruntime, "cpu_features", lambda: isa)
    return open_target("onnxruntime").configure(CompileOptions.of("onnxruntime", **options))


@pytest.mark.parametrize("quantize", ["int8", "int4", "keep"])
def test_kernels_are_llmc_s_where_the_cpu_runs_them(monkeypatch: pytest.MonkeyPatch, quantize: str) -> None:
    assert configured(monkeypatch, ISA, quantize=quantize).get("kernels") == "llmc"
    assert configured(monkeypatch, ISA, quantize=quantize, kernels="onnxruntime").get("kernels") == "onnxruntime"
    assert configured(monkeypatch, ISA, quantize=quantize, specialise=True).get("kernels") is None
    assert configured(monkeypatch, KERNEL_SETS[3].isa, quantize=quantize).get("kernels") == "llmc"
    assert configured(monkeypatch, ("x86_64", "avx2", "fma"), quantize=quantize).get("kernels") is None
    assert configured(monkeypatch, ISA, quantize="none").get("kernels") is None


def test_kernels_that_cannot_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"llmc needs .* avx2 \(avx2 f16c fma\).*; this one has x86_64, avx2"):
        configured(monkeypatch, ("x86_64", "avx2"), quantize="int8", kernels="llmc")
    with pytest.raises(InputError, match="--kernels llmc is for quantised matrices; --quantize none leaves none"):
        configured(monkeypatch, ISA, quantize="none", kernels="llmc")
    with pytest.raises(InputError, match="--kernels llmc runs any shape; leave out --specialise"):
        configured(monkeypatch, ISA, quantize="int8", kernels="llmc", specialise=True)
    with pytest.raises(UnknownNameError, match="unknown kernels 'mlas'; known: llmc, onnxruntime"):
        open_target("onnxruntime").configure(CompileOptions.of("onnxruntime", kernels="mlas"))
    with pytest.raises(InputError, match="--kernels is for cpu, onnxruntime; leave it out for xla"):
        open_target("xla").configure(CompileOptions.of("xla", kernels="llmc"))


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("kernels", ["llmc", "onnxruntime"])
def test_weights_are_in_groups_of_the_size_that_was_requested(
    library: Path, tmp_path: Path, quantize: str, kernels: str
) -> None:
    model, sizes = tiny.write_model(tmp_path / "model", "llama"), []
    for group in (16, 32):  # 4 bits are too few for a tiny model in any
        verify = "all" if quantize == "int8" else "none"
        given = {"quantize": quantize, "kernels": kernels, "group_size": group, "verify": verify}
        _, path = compile_with(model, tmp_path, **given)
        manifest = Bundle.open(path).manifest
        assert manifest.options["group_size"] == group
        sizes.append(blob_path(path, manifest.files["weights"]).stat().st_size)
    assert sizes[0] > sizes[1]


def test_a_gguf_in_groups_of_a_size_is_quantised_and_not_kept(library: Path, tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "m.gguf", types=BLOCKS)
    _, path = compile_with(model, tmp_path, group_size=32, verify="none")
    assert Bundle.open(path).manifest.options["quantize"] == "int8"


def test_groups_that_weights_cannot_have_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="--group-size 17 must be one of 16, 32, 64, 128, 256"):
        configured(monkeypatch, ISA, quantize="int8", group_size=17)
    for quantize in ("keep", "none"):
        with pytest.raises(InputError, match=f"--group-size is for --quantize int8 and int4, not for {quantize}"):
            configured(monkeypatch, ISA, quantize=quantize, group_size=32)


# Models that the kernels do not take


def wide_weights(folder: Path) -> Path:
    """A model with a matrix beyond what float16 scales hold."""
    model = tiny.write_model(folder / "model", "llama")
    (file,) = model.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.layers.0.self_attn.v_proj.weight"] *= np.float32(1e6)
    save_file(tensors, file, {"format": "pt"})
    return model


@pytest.mark.parametrize(
    ("unfit", "why"),
    [("heads", "attention of heads 520 wide: llmc's kernels take heads of at most 512 values"),
     ("weights", "v_proj.weight: weights are too large for the float16 scales of llmc's kernels")],
)  # fmt: skip
def test_the_runtime_s_kernels_take_what_llmc_s_do_not(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unfit: str, why: str
) -> None:
    if unfit == "heads":
        monkeypatch.setitem(tiny.DEEP, "llama-wide-heads", {"head_dim": 520})
        model = tiny.write_model(tmp_path / "model", "llama-wide-heads")
    else:
        model = wide_weights(tmp_path)
    checked = {"verify": "none" if unfit == "weights" else "all"}
    result, path = compile_with(model, tmp_path, quantize="int8", **checked)
    manifest = Bundle.open(path).manifest
    assert manifest.executor == "onnxruntime" and not sets_in(manifest.files)
    assert manifest.options["kernels"] == "onnxruntime"
    assert why in manifest.options["choice"] == result.choice and "use --kernels" not in result.choice
    again, _ = compile_with(model, tmp_path, quantize="int8", **checked)
    assert (again.built, again.choice) == (0, result.choice)
    with pytest.raises(UnfitError, match=f"{re.escape(why)}.*; use --kernels onnxruntime"):
        compile_with(model, tmp_path, quantize="int8", kernels="llmc", **checked)
    with pytest.raises(UnfitError, match=f"{re.escape(why)}.*; use --kernels onnxruntime, without --kv-cache-dtype"):
        compile_with(model, tmp_path, quantize="int8", kv_cache_dtype="int8", **checked)
    with pytest.raises(UnfitError, match="without --kv-cache-dtype and --prompt-dtype"):
        compile_with(model, tmp_path, quantize="int8", prompt_dtype="bf16", **checked)


def test_a_gguf_s_blocks_are_kept_as_if_requested_and_the_manifest_says_why(library: Path, tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "m.gguf", types=BLOCKS)
    requested, path = compile_with(model, tmp_path, quantize="keep", verify="none")
    keys = [one.key for one in Bundle.open(path).manifest.executables]
    built, path = compile_with(model, tmp_path, verify="none")
    manifest = Bundle.open(path).manifest
    assert (built.built, [one.key for one in manifest.executables]) == (0, keys)
    assert manifest.options["quantize"] == "keep"
    assert manifest.options["choice"] == built.choice == f"{requested.choice}; {KEPT}"


def test_a_gguf_that_the_kernels_do_not_take_has_int8_in_the_runtime_s_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_options, "_MOST_DIM", 8)
    built, path = compile_with(write_gguf(tmp_path / "m.gguf", types=BLOCKS), tmp_path, verify="none")
    options = Bundle.open(path).manifest.options
    assert (options["quantize"], options["kernels"]) == ("int8", "onnxruntime")
    assert "llmc's kernels take heads of at most 8 values" in built.choice and "keep" not in built.choice


# A bundle


def test_it_opens_on_every_cpu_with_the_features_that_its_kernels_need(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, own = Bundle.open(bundle), own_set()
    assert sorted(opened.manifest.isa) == sorted(own.isa)
    for more in ((), ("avx512_bf16",), ("amx_int8", "avx")):
        monkeypatch.setattr(compatibility, "cpu_features", lambda more=more: (*own.isa, *more))
        open_executor(opened, 2, 2).close()
    for lacking in own.isa:
        monkeypatch.setattr(
            compatibility, "cpu_features", lambda lacking=lacking: tuple(f for f in own.isa if f != lacking)
        )
        other = best_set([f for f in own.isa if f != lacking])
        how = f"--cpu {own.name},{other.name}" if other else "--kernels onnxruntime"
        with pytest.raises(
            ArtifactError,
            match=rf"its kernels are for {own.name} \(without {lacking} here\)\. "
            rf"Compile for this CPU, too: llmc compile .* --device onnxruntime {how} -o {re.escape(str(bundle))}$",
        ):
            open_executor(opened, 2, 2)


def test_a_manifest_that_says_less_than_its_kernels_need_opens_no_further(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(bundle, copy)
    edit_manifest(copy, lambda document: document.update(isa=[]))
    monkeypatch.setattr(compatibility, "cpu_features", lambda: tuple(f for f in own_set().isa if f != "fma"))
    with pytest.raises(ArtifactError, match=r"its kernels are for .*without fma"):
        open_executor(Bundle.open(copy), 2, 2)


@default_cases(2)
@pytest.mark.parametrize("case", [*tiny.REPRESENTATIVES, *tiny.VARIANTS, "mixtral", "gemma2", "bloom", "mamba"])
def test_every_architecture_is_verified(library: Path, tmp_path: Path, case: str) -> None:
    result, path = compile_with(tiny.write_model(tmp_path / "model", case), tmp_path, quantize="int8")
    assert result.verification["leak"] == 0
    manifest = Bundle.open(path).manifest
    assert manifest.executor == "onnxruntime-llmc" and sets_in(manifest.files) == [own_set()]
    assert manifest.options["kernels"] == "llmc"


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_logits_are_as_near_to_float32_as_the_runtime_s_own(library: Path, tmp_path: Path, quantize: str) -> None:
    model, text, built = tiny.write_model(tmp_path / "model", "llama"), list(range(3, 33)), {}
    for name, chosen in (("f32", {}), ("llmc", {"kernels": "llmc"}), ("onnxruntime", {"kernels": "onnxruntime"})):
        (folder := tmp_path / name).mkdir()
        _, path = compile_with(model, folder, quantize=quantize if chosen else "none", verify="none", **chosen)
        executor = open_executor(Bundle.open(path), 1, 2)
        built[name] = executor.run_each(exact("prompt", [0], [text], [0])).copy()
    apart = {name: float(np.sqrt(np.mean((logits - built["f32"]) ** 2))) for name, logits in built.items()}
    assert 0 < apart["llmc"] < 1.2 * apart["onnxruntime"]


def test_the_library_counts_as_native_code_which_needs_a_signature_from_elsewhere(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested, get = [], Store.get_or_build

    def noting(store: Store, key: Key, build: Any) -> Any:
        requested.append(key)
        return get(store, key, build)

    monkeypatch.setattr(Store, "get_or_build", noting)
    compile_with(tiny.write_model(tmp_path / "model", "llama"), tmp_path, quantize="int8", verify="none")
    assert {key.kind for key in requested if not key.is_local and code_of_entry(key, {})} == {"kernels", "executable"}


def test_rows_of_all_lengths_share_a_step(executor: Executor) -> None:
    random = np.random.default_rng(0)
    texts = [random.integers(0, 200, n).tolist() for n in (20, 7, 30, 1)]
    alone, after = [], []
    for slot, text in enumerate(texts):
        alone.append(executor.run(ragged("prompt", [slot], [text], [0]))[0].copy())
        after.append(executor.run(ragged("decode", [slot], [[7]], [len(text)]))[0].copy())
    executor.run(ragged("prompt", [5, 4], [texts[0][:12], texts[2][:29]], [0, 0]))
    rest = [texts[2][29:], texts[1], texts[0][12:], texts[3]]
    mixed = executor.run(ragged("prompt", [4, 1, 5, 0], rest, [29, 0, 12, 0]))
    for row, text in enumerate((2, 1, 0, 3)):
        assert (mixed[row] == alone[text]).all(), "sums have one order, whatever a token is computed with"
    mixed = executor.run(ragged("prompt", [4, 5, 2], [[7], [7], texts[1]], [30, 20, 0], decode_rows=2))
    for row, wanted in enumerate((after[2], after[0], alone[1])):
        assert (mixed[row] == wanted).all()


def test_each_token_is_scored_and_top_logits_are_the_largest(executor: Executor) -> None:
    text = list(range(5, 17))
    each = executor.run_each(ragged("prompt", [1, 0], [text, text[:3]], [0, 0])).copy()
    assert each.shape[0] == 15 and (each[:3] == each[12:]).all()
    assert (executor.logits()[:2] == each[[11, 14]]).all()
    top = executor.run_top(ragged("prompt", [2], [text], [0]))
    logits = executor.logits()[0]
    assert top.ids[0].tolist() == np.argsort(-logits, kind="stable")[:4].tolist()


def test_a_prefix_comes_back_as_it_was_taken(executor: Executor) -> None:
    text = list(range(30))
    executor.run(ragged("prompt", [0], [text], [0]))
    prefix = executor.export_prefix(0, 30)
    assert prefix[0].dtype == np.float32
    wanted = executor.run(ragged("decode", [0], [[7]], [30]))[0].copy()
    executor.import_prefix(3, prefix)
    executor.copy_prefix(3, 2, 30)
    for slot in (3, 2):
        assert (executor.run(ragged("decode", [slot], [[7]], [30]))[0] == wanted).all()


def test_texts_are_the_same_alone_and_together_and_from_drafts(bundle: Path) -> None:
    prompts = [[*range(3, 3 + n), *range(3, 3 + n)] for n in (4, 9, 15, 11)]
    greedy = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    with BundleLLM(bundle) as llm:
        together = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, greedy)]
        alone = [list(llm.generate([p], greedy)[0].outputs[0].token_ids) for p in prompts]
    with BundleLLM(bundle, speculative_config={"method": "ngram", "num_speculative_tokens": 4}) as llm:
        drafted = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, greedy)]
    assert together == alone == drafted


@full
def test_texts_of_a_model_with_states_are_the_same_alone_and_together(library: Path, tmp_path: Path) -> None:
    """Prompts that share a beginning, more of them than slots: states come and go with their slots."""
    result, path = compile_with(tiny.write_model(tmp_path / "model", "qwen3_5_text"), tmp_path, quantize="int8")
    assert result.verification["leak"] == 0
    prompts = [list(range(3, 3 + n)) for n in (4, 9, 15, 11, 15, 1)]
    greedy = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    with BundleLLM(path) as llm:
        together = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, greedy)]
    with BundleLLM(path) as llm:
        alone = [list(llm.generate([p], greedy)[0].outputs[0].token_ids) for p in prompts]
    assert together == alone


def test_a_library_that_was_damaged_is_not_loaded(bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(bundle, copy)
    opened = Bundle.open(copy)
    path = blob_path(copy, opened.manifest.files[own_set().file])
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.unlink()
    path.write_bytes(data)
    with pytest.raises(ArtifactError, match="was altered"):
        open_executor(Bundle.open(copy), 2, 2).open_all()
