"""Compiles of quantised checkpoints: codes are kept, results are the float model's, and the summary counts matrices."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from llmc.api import LLM
from llmc.artifacts.bundle.kernel_sets import KERNEL_SETS
from llmc.artifacts.store.store import Store
from llmc.compiler.architectures.shared.block_form import BlockForm
from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.checkpoint.base import stored_forms
from llmc.compiler.frontend.skeleton import model_config
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import CompileResult, compile_bundle
from llmc.compiler.targets import open_target
from llmc.compiler.targets.onnxruntime.formats import MatrixFormat, OnnxOptions
from llmc.compiler.targets.openvino import compression
from llmc.compiler.weights import nbits
from llmc.errors import InputError
from llmc.runtime.engine.sampling.params import SamplingParams
from tests.compiler import tiny
from tests.compiler.checkpoint.quantised import packers
from tests.compiler.checkpoint.writers import BLOCK_KINDS, write_blocks
from tests.compiler.targets.openvino.test_compression import float4, four_bits, given_back
from tests.tiers import default_cases

PLAN = tiny.kinds_plan()
RUNTIMES: dict[str, dict[str, Any]] = {
    "onnxruntime": {"device": "onnxruntime", "kernels": "onnxruntime"},
    "openvino": {"device": "openvino"},
}
PROMPTS = ([5, 80, 3, 41, 7], [200, 9])


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("kept") / "store")


def compiled(folder: Path, store: Store, case: str, **requested: Any) -> tuple[CompileResult, packers.Values]:
    values = packers.write(folder / "model", *packers.CASES[case])
    options = CompileOptions.of(**{"quantize": "keep", "verify": "all", **requested})
    built = compile_bundle(str(folder / "model"), folder / "bundle", PLAN, options, store, lambda event: None)
    return built, values


def summary(result: CompileResult) -> str:
    (line,) = open_target(result.device).describe(result.analysis)
    return line.removeprefix("quantized matrices of the checkpoint: ")


def greedy(values: packers.Values, prompt: list[int], count: int) -> list[int]:
    """Of the float model that has these values."""
    model = AutoModelForCausalLM.from_config(model_config(tiny.config(tiny.WIDE)), dtype=torch.float32).eval()
    model.load_state_dict({name: torch.from_numpy(held.copy()) for name, held in values.items()})
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


# Weights, to the bit


@default_cases(6)
@pytest.mark.parametrize("case", packers.EXACT)
def test_blocks_for_onnxruntime_are_the_values_of_the_format(case: str, tmp_path: Path) -> None:
    values = packers.write(tmp_path, *packers.CASES[case])
    checkpoint = open_checkpoint(tmp_path)
    options = OnnxOptions(32, stored=stored_forms(checkpoint))
    for name in options.stored:
        held = options.format([name], values[name].shape[1])
        assert held.block <= 64 and held.block & (held.block - 1) == 0
        blocks = (nbits.kept4_blocks if held.family == "kept4" else nbits.kept8_blocks)([name], checkpoint, held.block)
        quantized, scales, offsets = blocks
        assert bool(offsets.any()) == held.offsets
        built = (quantized.astype(np.float64) - (1 << (held.bits - 1))) * scales[..., None] + offsets[..., None]
        bound = 0 if "float32" not in case else 2.0**-22 * np.abs(values[name]).max()
        np.testing.assert_allclose(built.reshape(values[name].shape), values[name], rtol=2.0**-24, atol=bound)


@default_cases(6)
@pytest.mark.parametrize("case", packers.EXACT)
def test_groups_for_openvino_are_the_values_of_the_format(case: str, tmp_path: Path) -> None:
    from llmc.compiler.targets.openvino.formats import Constants, Kept

    values = packers.write(tmp_path, *packers.CASES[case])
    checkpoint = open_checkpoint(tmp_path)
    stored = stored_forms(checkpoint)
    for name in stored:
        held = Kept(Constants(), stored).held([name], values[name].shape[1])
        parts = getattr(compression, held.family)([name], checkpoint, held.group)
        built = {"u4kept": four_bits, "f4kept": float4}.get(held.family, given_back)(parts)
        np.testing.assert_array_equal(built, values[name])


MIXED = {
    "Q4_K_M": (
        {"v_proj": "Q6_K", "down": "Q6_K", "embed": "Q6_K", "": "Q4_K"},
        "5 in more bits than stored: 2 Q4_K in 8, 3 Q6_K in 8",
    ),
    "blocks of 32": (
        {"q_proj": "Q5_1", "k_proj": "Q5_0", "gate": "Q8_0", "down": "Q4_1", "": "IQ4_NL"},
        "6 in more bits than stored: 4 IQ4_NL in 8, 1 Q5_0 in 8, 1 Q5_1 in 8",
    ),
    "low bits": (
        {"v_proj": "Q3_K", "down": "Q3_K", "embed": "IQ4_XS", "": "Q2_K"},
        "8 in more bits than stored: 1 IQ4_XS in 8, 5 Q2_K in 4, 2 Q3_K in 4",
    ),
}  # fmt: skip
"""Matrices of a GGUF file by a part of their name: mixtures, some of them side by side in one product; and what of
them is wider than it was."""


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_blocks_of_gguf_are_the_values_that_gguf_py_gives(kind: str, tmp_path: Path) -> None:
    """For both runtimes. OpenVINO's zero points of minimums are rounded quotients."""
    from llmc.compiler.targets.openvino.formats import Constants, Kept

    values = write_blocks(tmp_path / "m.gguf", {"": kind})
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    stored = stored_forms(checkpoint)
    name = "model.layers.0.self_attn.q_proj.weight"
    wanted = values[name]
    bound = 2.0**-21 * np.abs(wanted).max() if stored[name].offsets else 0
    for normed in (True, False):
        onnx = OnnxOptions(32, stored=stored).format([name], 256, normed)
        assert onnx.block == stored[name].block and onnx.bits == stored[name].bits
        make = nbits.kept4_blocks if onnx.family == "kept4" else nbits.kept8_blocks
        for low in (False, True):
            quantized, scales, offsets = make([name], checkpoint, onnx.block, low=low)
            built = (quantized.astype(np.float64) - (1 << (onnx.bits - 1))) * scales[..., None] + offsets[..., None]
            np.testing.assert_allclose(built.reshape(wanted.shape), wanted, rtol=2.0**-24, atol=bound)
    held = Kept(Constants(), stored).held([name], 256)
    assert held.group == stored[name].block
    parts = getattr(compression, held.family)([name], checkpoint, held.group)
    built32 = (four_bits if held.family == "u4kept" else given_back)(parts)
    np.testing.assert_allclose(built32, wanted, rtol=0, atol=bound)


@pytest.mark.parametrize("kind", ["Q5_1", "Q5_K", "Q2_K"])
def test_quantized_weights_with_minimums_lie_about_the_zero_of_products(kind: str, tmp_path: Path) -> None:
    """What a product of quantised activations loses is as large as the codes that it is made with."""
    write_blocks(tmp_path / "m.gguf", {"": kind})
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    name = "model.layers.0.self_attn.q_proj.weight"
    form = checkpoint.stored_form(name)
    assert form is not None
    make = nbits.kept4_blocks if form.bits == 4 else nbits.kept8_blocks
    quantized, _, _ = make([name], checkpoint, form.block)
    half = {"Q2_K": 2}.get(kind, 16)
    middle = 1 << (form.bits - 1)
    assert (quantized.min(), quantized.max()) == (middle - half, middle + half - 1)


FOUR, EIGHT = BlockForm("gptq", 4, 128, "zeros"), BlockForm("gptq", 8, 96, "")
ROWS = BlockForm("compressed-tensors", 8, 256, "")


def test_blocks_of_other_sizes_are_cut_to_what_a_runtime_multiplies() -> None:
    options = OnnxOptions(32, stored={"four": FOUR, "eight": EIGHT, "rows": ROWS})
    assert options.format(["four"], 256) == MatrixFormat("kept4", 4, 64, True, True)
    assert options.format(["four"], 256, normed=True) == MatrixFormat("kept4", 4, 32, True, True)
    assert options.format(["rows"], 256) == MatrixFormat("kept8", 8, 64)
    assert options.format(["four", "eight"], 384) == MatrixFormat("kept8", 8, 32, True, True)
    assert options.format(["four", "float"], 256) == MatrixFormat("kept8", 8, 64, True, True)


def test_groups_of_openvino_are_as_large_as_the_checkpoint_s() -> None:
    from llmc.compiler.targets.openvino.formats import Constants, Held, Kept

    kept = Kept(Constants(), {"four": FOUR, "eight": EIGHT, "rows": ROWS})
    assert kept.held(["four"], 256) == Held("u4kept", 128)
    assert kept.held(["four", "float"], 256) == Held("u8kept", 32)
    assert kept.held(["four", "eight"], 384) == Held("u8kept", 32)
    assert kept.held(["rows"], 256) == Held("i8kept", 0)
    assert kept.held(["rows", "rows"], 512) == Held("i8kept", 256)


# Bundles


@default_cases(3)
@pytest.mark.parametrize("runtime", list(RUNTIMES))
@pytest.mark.parametrize("case", packers.EXACT)
def test_every_matrix_in_blocks_is_kept(case: str, runtime: str, store: Store, tmp_path: Path) -> None:
    """What is left is the rounding to 8 bits of activations, and of what is not stored in codes."""
    result, values = compiled(tmp_path, store, case, **RUNTIMES[runtime])
    count = sum(name.split(".")[-2] in packers.PROJECTIONS for name in values) - (case == "gptq dynamic")
    assert summary(result).partition(" (")[0] == f"{count} kept exactly"
    assert result.verification["mean_kl"] < 2e-3


@default_cases(2)
@pytest.mark.parametrize("runtime", list(RUNTIMES))
@pytest.mark.parametrize("quantize", ["keep", "int4"])
@pytest.mark.parametrize("case", ["gptq act-order", "pack-quantized act-order"])
def test_matrices_are_kept_with_their_inputs_in_the_order_of_groups(
    case: str, quantize: str, runtime: str, store: Store, tmp_path: Path
) -> None:
    result, _ = compiled(tmp_path, store, case, **RUNTIMES[runtime], quantize=quantize)
    assert summary(result) == "7 kept exactly"
    assert result.verification["mean_kl"] < (2e-3 if quantize == "keep" else 0.1)


@default_cases(1)
@pytest.mark.parametrize("runtime", list(RUNTIMES))
def test_matrices_side_by_side_that_want_different_orders_are_rounded_where_they_are_one_matmul(
    runtime: str, store: Store, tmp_path: Path
) -> None:
    pack = {name: packers.gptq(act_order=True, seed=name == "k_proj") for name in packers.PROJECTIONS}
    packers.write(tmp_path / "model", packers.gptq_config(desc_act=True), pack)
    options = CompileOptions.of(**{"quantize": "keep", "verify": "all", **RUNTIMES[runtime]})
    result = compile_bundle(str(tmp_path / "model"), tmp_path / "bundle", PLAN, options, store, lambda event: None)
    rounded = "4 kept exactly, 3 rounded again (3 gptq with act-order)"
    assert summary(result) == {"onnxruntime": "7 kept exactly", "openvino": rounded}[runtime]
    assert result.verification["mean_kl"] < 2e-3


@default_cases(1)
@pytest.mark.parametrize("runtime", list(RUNTIMES))
@pytest.mark.parametrize("case", list(MIXED))
def test_mixtures_of_gguf_s_types_are_kept(case: str, runtime: str, store: Store, tmp_path: Path) -> None:
    """Blocks of 16 and of 32 too, side by side; rows looked up; a tied head."""
    kinds, wider = MIXED[case]
    write_blocks(tmp_path / "m.gguf", kinds)
    options = CompileOptions.of(**{"quantize": "keep", "verify": "all", **RUNTIMES[runtime]})
    result = compile_bundle(str(tmp_path / "m.gguf"), tmp_path / "bundle", PLAN, options, store, lambda event: None)
    if runtime == "onnxruntime":  # q and k, and v of other bits, are two products there
        wider = wider.replace("5 in more bits than stored: 2 Q4_K in 8, ", "3 in more bits than stored: ")
    assert summary(result) == f"8 kept exactly ({wider})"
    assert result.verification["mean_kl"] < 5e-4


@default_cases(1)
@pytest.mark.parametrize("runtime", list(RUNTIMES))
@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("fp8 in tiles", "float8"), ("float-quantized by channel", "float8"), ("naive-quantized in tiles", "float8"),
    ],
)  # fmt: skip
def test_what_is_no_blocks_is_rounded_and_counted(
    case: str, why: str, runtime: str, store: Store, tmp_path: Path
) -> None:
    result, _ = compiled(tmp_path, store, case, **RUNTIMES[runtime])
    half = runtime == "openvino"
    assert summary(result) == f"0 kept exactly, 7 rounded again (7 {why}{' in float16' if half else ''})"
    assert result.verification["mean_kl"] < 4e-3


@default_cases(2)
@pytest.mark.parametrize("runtime", list(RUNTIMES))
@pytest.mark.parametrize("case", ["gptq act-order", "awq groups of 128", "int-quantized by channel", "fp8 in tiles"])
def test_in_float32_greedy_tokens_are_those_of_the_values(
    case: str, runtime: str, store: Store, tmp_path: Path
) -> None:
    requested = {**RUNTIMES[runtime], "kernels": None, "quantize": "none"}
    result, values = compiled(tmp_path, store, case, **requested)
    assert summary(result) == "0 kept exactly, 7 widened to float32"
    assert result.verification["mean_kl"] < 1e-6
    llm = LLM(model=str(tmp_path / "bundle"))
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS],
        SamplingParams(max_tokens=8, temperature=0, ignore_eos=True),
    )
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.outputs[0].token_ids == greedy(values, prompt, 8)


def test_what_was_not_requested_to_be_kept_is_counted(store: Store, tmp_path: Path) -> None:
    result, _ = compiled(tmp_path, store, "awq groups of 32", **RUNTIMES["onnxruntime"], quantize="int8")
    assert summary(result) == "0 kept exactly, 7 rounded again (7 without --quantize keep)"
    result, _ = compiled(tmp_path / "int4", store, "awq groups of 128", **RUNTIMES["openvino"], quantize="int4")
    assert summary(result) == "7 kept exactly"


def test_the_result_says_what_of_the_checkpoint_was_left_out(store: Store, tmp_path: Path) -> None:
    result, _ = compiled(tmp_path, store, "int-quantized by channel", **RUNTIMES["onnxruntime"], verify="none")
    (notice,) = result.to_json()["notices"]
    assert "quantization_config's settings of activations are ignored" in notice


def test_a_checkpoint_in_floats_has_no_line(store: Store, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tiny.write_model(tmp_path / "model", tiny.WIDE)
    options = CompileOptions.of(**RUNTIMES["onnxruntime"], quantize="int8", verify="none")
    built = compile_bundle(str(tmp_path / "model"), tmp_path / "bundle", PLAN, options, store, lambda event: None)
    assert "kept" not in built.analysis and open_target("onnxruntime").describe(built.analysis) == []


# Options of a runtime's products


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_an_embedding_and_a_head_are_in_four_bits_where_that_is_requested(
    runtime: str, tmp_path: Path, store: Store
) -> None:
    tiny.write_model(tmp_path / "model", "llama")
    firsts = []
    for bits in (8, 4):
        options = CompileOptions.of(**RUNTIMES[runtime], quantize="int4", lm_head_bits=bits, verify="none")
        compile_bundle(str(tmp_path / "model"), tmp_path / f"{bits}", PLAN, options, store, lambda event: None)
        with LLM(tmp_path / f"{bits}") as llm:
            (built,) = llm.generate([{"prompt_token_ids": [5, 80, 3]}], SamplingParams(max_tokens=1, logprobs=5))
        firsts.append(built.outputs[0].logprobs[0])
    common = firsts[0].keys() & firsts[1].keys()
    assert len(common) >= 2 and firsts[0] != firsts[1]
    assert all(abs(firsts[0][t].logprob - firsts[1][t].logprob) < 0.5 for t in common)


def test_activations_stay_float32_in_onnx_runtimes_own_products(tmp_path: Path, store: Store) -> None:
    write_blocks(tmp_path / "m.gguf", MIXED["Q4_K_M"][0])
    options = CompileOptions.of(**RUNTIMES["onnxruntime"], quantize="keep", activation_group_size=0, verify="all")
    built = compile_bundle(str(tmp_path / "m.gguf"), tmp_path / "bundle", PLAN, options, store, lambda event: None)
    assert "8 kept exactly" in summary(built)
    assert built.verification["mean_kl"] < 1e-7


@pytest.mark.parametrize(
    ("requested", "why"),
    [
        ({"activation_group_size": 32}, "quantises activations in the groups of the weights, or with 0 not at all"),
        ({"activation_group_size": 0, "quantize": "none", "kernels": None}, "--quantize none leaves none"),
        ({"activation_group_size": 0, "kernels": "llmc"}, "add --kernels onnxruntime"),
    ],
)
def test_activations_that_onnx_runtime_does_not_take_are_refused(
    requested: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmc.compiler.targets.onnxruntime.target.cpu_features", lambda: KERNEL_SETS[0].isa)
    given = {k: v for k, v in {"quantize": "int4", "kernels": "onnxruntime", **requested}.items() if v is not None}
    with pytest.raises(InputError, match=why):
        open_target("onnxruntime").configure(CompileOptions.of("onnxruntime", **given))
