"""Bundles of a tiny model whose requests choose a LoRA adapter, on the devices whose graphs take one: verified, and
each request's tokens those of transformers over the model that its adapter is merged into."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

from llmc.artifacts.store.store import Store
from llmc.buckets.limits import Limits
from llmc.cli.main import main
from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.frontend.real_model import load_real_model
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compilation import Compilation, compile_disaggregated
from llmc.compiler.pipeline.compile import compile_bundle
from llmc.compiler.pipeline.resolve import CompileJob
from llmc.errors import CheckpointError, InputError
from llmc.runtime.bundle import Bundle
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.llm import BundleLLM
from llmc.settings import Settings
from llmc.testing.toy import toy_plan
from tests.adapters import with_choices, write_lora
from tests.compiler import tiny
from tests.compiler.targets.onnxruntime.kernels.host import own_set
from tests.tiers import default_cases

ATTENTION = [f"model.layers.{i}.self_attn.{name}_proj" for i in (0, 1) for name in "qv"]
MLP = ["model.layers.0.mlp.gate_proj", "model.layers.1.mlp.down_proj", "model.layers.1.self_attn.o_proj"]
PROMPTS = [[3, 5, 9], [20, 7, 1, 8, 2, 6], [3, 5, 9], [3, 5, 9, 11]]
CHOSEN = ["some", None, "other", "other"]
PLAN = toy_plan([(1, 8, 0), (2, 8, 8)], [(2, 16)], Limits(16, 2, 16, 8))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    base = tiny.write_model(folder / "base", "llama")
    some = write_lora(folder / "some", base, ATTENTION, seed=1, r=3, size=0.3)
    return with_choices(base, {"some": some, "other": write_lora(folder / "other", base, [*ATTENTION[:1], *MLP], seed=2,
                                                                 r=5, size=0.3)})  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def wanted(model: str) -> list[list[int]]:
    checkpoint, names = open_checkpoint(model), [None, "some", "other"]
    built = []
    for prompt, name in zip(PROMPTS, CHOSEN, strict=True):
        reference: Any = load_real_model(checkpoint.of_adapter(names.index(name)))
        ids = torch.tensor([prompt])
        built.append(
            reference.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)[0].tolist()
        )
    return [tokens[len(prompt) :] for tokens, prompt in zip(built, PROMPTS, strict=True)]


CASES: dict[str, dict[str, Any]] = {
    "onnxruntime": {"device": "onnxruntime"},
    "onnxruntime, a graph a bucket": {"device": "onnxruntime", "specialise": True},
    "openvino": {"device": "openvino"},
    "openvino, fixed decode steps": {"device": "openvino", "specialise": True},
    "xla": {"device": "xla"},
}


@default_cases(1)
@pytest.mark.parametrize("case", CASES)
def test_each_request_has_its_adapter(
    tmp_path: Path, model: str, store: Store, wanted: list[list[int]], case: str
) -> None:  # fmt: skip
    requested = CompileOptions.of(**{"quantize": "none", "verify": "all", **CASES[case]})
    built = compile_bundle(model, tmp_path / "bundle", PLAN, requested, store, lambda _: None)
    assert built.verification["rows"] >= 3 * 3, "three buckets, each with both adapters and none"
    assert built.verification["mean_kl"] < 1e-9
    assert built.verification["greedy_equal"] == built.verification["greedy_sequences"] == 6 + 2
    with BundleLLM(tmp_path / "bundle", threads=1) as llm:
        params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False, lora=CHOSEN)
    assert [list(output.outputs[0].token_ids) for output in outputs] == wanted


def test_in_8_bits_by_llmcs_kernels(tmp_path: Path, model: str, store: Store) -> None:
    """Which read the chosen adapters' matrices alone."""
    own_set()
    requested = CompileOptions.of("onnxruntime", quantize="int8", verify="all", kernels="llmc")
    built = compile_bundle(model, tmp_path / "bundle", PLAN, requested, store, lambda _: None)
    bundle = Bundle.open(tmp_path / "bundle")
    (executable,) = bundle.manifest.executables
    nodes = onnx.load_from_string(bytes(bundle.files.read(executable.blob))).graph.node
    groups = "q, k and v; o; gate and up; down"
    assert [node.op_type for node in nodes].count("Adapted") == 2 * len(groups.split(";"))
    assert built.verification["rows"] >= 3 * 3
    assert built.verification["mean_kl"] < 0.005


@default_cases(2)
@pytest.mark.parametrize(
    ("requested", "matmuls"),
    [({"quantize": "none"}, 8), ({"quantize": "int8", "group_size": 32}, 8), ({"quantize": "int8"}, 9),
     ({"quantize": "int4", "verify": "none"}, 12)],
)  # fmt: skip
def test_openvino_multiplies_by_the_second_matrix_with_the_weights(
    tmp_path: Path, model: str, store: Store, requested: dict[str, Any], matmuls: int
) -> None:
    """Of q, k and v, of o, of gate and up and of down; by itself where one form does not hold both: 4 bits, and groups
    of 64 of a width that these do not divide, which is down's."""
    options = CompileOptions.of("openvino", **{"verify": "all", **requested})
    built = compile_bundle(model, tmp_path / "bundle", PLAN, options, store, lambda _: None)
    bundle = Bundle.open(tmp_path / "bundle")
    xml = bytes(bundle.files.read(bundle.executable("any", None, None, None).blob)).decode()
    head = 1
    assert len(re.findall('type="FullyConnected(?:Compressed)?"', xml)) == head + 2 * matmuls
    if options.verify == "all":
        assert built.verification["rows"] >= 3 * 3
        assert built.verification["mean_kl"] < (1e-9 if options.quantize == "none" else 0.005)


def test_from_the_command_line(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As vLLM's takes adapters, several behind one flag."""
    base = Path(model.partition("::")[0])
    flags = ["--device", "onnxruntime", "--max-model-len", "16", "--max-num-seqs", "2", "--verify", "none", "-q"]
    flags += ["--cache-dir", str(tmp_path / "store"), "-o", str(tmp_path / "bundle"), "--quantize", "none"]
    named = [f"{name}={base.parent / name}" for name in ("some", "other")]
    assert main(["compile", "--lora-modules", *named, str(base), *flags]) == 0
    capsys.readouterr()
    assert main(["cache", "show", str(tmp_path / "bundle")]) == 0
    shown = capsys.readouterr().out
    assert '"name": "some"' in shown
    assert str(base.parent) not in (tmp_path / "bundle" / "manifest.json").read_text()
    requested = ["generate", str(tmp_path / "bundle"), "-p", "Hi", "--max-tokens", "2", "--threads", "1"]
    assert main([*requested, "--lora-name", "some"]) == 0
    assert main([*requested, "--lora-name", "none"]) != 0
    assert "no adapter 'none'; it has some, other" in capsys.readouterr().err
    assert main(["compile", str(base), "--lora-modules", "some", *flags]) != 0
    assert "--lora-modules some: write each adapter as NAME=ADAPTER" in capsys.readouterr().err


def test_devices_whose_graphs_take_none(model: str) -> None:
    for device in ("inductor", "neuron:trn2", "hpu", "openvino:NPU"):
        words = r"selectable adapters; devices that do: .*onnxruntime, .*tpu, xla\. .*--lora merges it"
        with pytest.raises(InputError, match=words):
            CompileJob.of(model, PLAN, CompileOptions.of(device))


def test_no_disaggregated(tmp_path: Path, model: str, store: Store) -> None:
    requested, settings = CompileOptions.of("onnxruntime"), Settings.from_environment()
    with pytest.raises(InputError, match="cannot be transferred between devices"):
        compile_disaggregated(
            Compilation.of(model, requested, store, settings, plan=PLAN),
            tmp_path / "disaggregated",
            "openvino",
            lambda _: None,
        )


def test_modules_that_are_no_linear_ones(tmp_path: Path, store: Store) -> None:
    """The head, and weights that are kept transposed."""
    requested = CompileOptions.of("onnxruntime", quantize="none", verify="none")
    for architecture, module, words in (
        ("llama", "lm_head", "lm_head is a Linear"), ("gpt2", "transformer.h.0.attn.c_proj", "c_proj is a Conv1D"),
    ):  # fmt: skip
        base = tiny.write_model(tmp_path / architecture, architecture)
        adapter = write_lora(tmp_path / f"{architecture}-lora", base, [module])
        with pytest.raises(CheckpointError, match=words):
            compile_bundle(
                with_choices(base, {"x": adapter}), tmp_path / "bundle", PLAN, requested, store, lambda _: None
            )
