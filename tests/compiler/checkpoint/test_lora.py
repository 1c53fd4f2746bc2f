"""LoRA adapters merged into a checkpoint, against the model with adapters beside its modules, as PEFT runs them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from llmc.artifacts.store.store import Store
from llmc.cli.main import main
from llmc.compiler.checkpoint import open_checkpoint, read_config, with_adapters
from llmc.compiler.frontend.real_model import load_real_model
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import compile_bundle
from llmc.errors import CheckpointError
from llmc.runtime.bundle import Bundle
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.llm import BundleLLM
from tests.compiler import tiny
from tests.tiers import full

IDS = torch.tensor([[3, 5, 9, 20, 7, 1]])
CONFIG: dict[str, Any] = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 3, "lora_alpha": 6, "bias": "none"}
ATTENTION = ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj", "model.layers.1.mlp.down_proj")
Change = Callable[[dict[str, Tensor]], object]


def write_adapter(
    folder: Path, model: Path, modules: Sequence[str] = ATTENTION, change: Change = lambda _: None, **config: Any
) -> Path:
    """An adapter of random numbers for some modules of a tiny model, its tensors changed before they are saved."""
    checkpoint, draw, tensors = open_checkpoint(model), torch.Generator().manual_seed(1), dict[str, Tensor]()
    rank = config.get("r", CONFIG["r"])

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw) * 0.3

    for module in modules:
        known = module if f"{module}.weight" in checkpoint.tensor_names() else "model.embed_tokens"
        rows, columns = checkpoint.shape(f"{known}.weight")
        if config.get("fan_in_fan_out"):
            rows, columns = columns, rows
        stem = f"base_model.model.{module}"
        if module.endswith("embed_tokens"):
            tensors |= {
                f"{stem}.lora_embedding_A": normal(rank, rows),
                f"{stem}.lora_embedding_B": normal(columns, rank),
            }
            continue
        tensors |= {f"{stem}.lora_A.weight": normal(rank, columns), f"{stem}.lora_B.weight": normal(rows, rank)}
        if config.get("use_dora"):
            tensors[f"{stem}.lora_magnitude_vector"] = normal(rows).abs() + 0.5
    change(tensors)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, "base_model_name_or_path": str(model), **config}))
    return folder


def beside(model: nn.Module, folder: Path) -> Tensor:
    """Logits of a model whose modules have the adapter's products added to what they give."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = {
        n.removeprefix("base_model.model."): t for n, t in load_file(folder / "adapter_model.safetensors").items()
    }
    for name, tensor in tensors.items():
        if name.endswith(".lora_A.weight"):
            _hook(model.get_submodule(name.removesuffix(".lora_A.weight")), tensors, name.removesuffix("lora_A.weight"),
                  _scale(config, name.removesuffix(".lora_A.weight")), bool(config.get("use_dora")))  # fmt: skip
        elif name.endswith(".lora_embedding_A"):
            stem = name.removesuffix("lora_embedding_A")
            low, high, scale = tensor, tensors[f"{stem}lora_embedding_B"], _scale(config, stem[:-1])

            def add(module: Any, given: Any, out: Tensor, low: Tensor = low, high: Tensor = high, scale: float = scale,
                    ) -> Tensor:  # fmt: skip
                return out + getattr(module, "embed_scale", 1) * scale * (low.T[given[0]] @ high.T)

            model.get_submodule(stem[:-1]).register_forward_hook(add)
        elif "lora" not in name:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, nn.Parameter(tensor))
    logits: Tensor = model(IDS).logits.detach()
    return logits


def _scale(config: Mapping[str, Any], module: str) -> float:
    alpha = config.get("alpha_pattern", {}).get(module.rpartition(".")[2], config["lora_alpha"])
    return float(alpha / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"]))


def _hook(module: nn.Module, tensors: Mapping[str, Tensor], stem: str, scale: float, dora: bool) -> None:
    low, high = tensors[f"{stem}lora_A.weight"], tensors[f"{stem}lora_B.weight"]
    bias = tensors.get(f"{stem}lora_B.bias", torch.zeros(len(high)))

    def add(_: nn.Module, given: Any, out: Tensor) -> Tensor:
        more = scale * (given[0] @ low.T @ high.T + bias)
        if not dora:
            return out + more
        weight = module.weight + scale * (high @ low)
        return (out + more) * (tensors[f"{stem}lora_magnitude_vector"] / weight.norm(dim=1))

    module.register_forward_hook(add)


CASES: dict[str, tuple[str, Sequence[str], dict[str, Any]]] = {
    "plain": ("llama", ATTENTION, {}),
    "rank-stabilised, an alpha of its own": ("llama", ATTENTION, {"use_rslora": True, "alpha_pattern": {"v_proj": 9}}),
    "magnitudes": ("llama", ATTENTION, {"use_dora": True}),
    "embedding": ("llama", ("model.embed_tokens", ATTENTION[0]), {}),
    "tied embedding": ("gemma2", ("model.embed_tokens", ATTENTION[0]), {}),
    "tied head": ("gemma2", ("lm_head",), {}),
    "transposed": ("gpt2", ("transformer.h.0.attn.c_attn", "transformer.h.1.attn.c_proj"), {"fan_in_fan_out": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_merged_is_what_runs_beside(tmp_path: Path, case: str) -> None:
    architecture, modules, config = CASES[case]
    model = tiny.write_model(tmp_path / "model", architecture)
    adapter = write_adapter(tmp_path / "adapter", model, modules, **config)
    base = load_real_model(open_checkpoint(model))
    plain = base(IDS).logits.detach()
    if case.startswith("tied"):  # PEFT's layers wrap one of the two
        base.lm_head = nn.Linear(*reversed(base.lm_head.weight.shape), bias=False)
        base.lm_head.weight = nn.Parameter(base.get_input_embeddings().weight.detach().clone())
    wanted = beside(base, adapter)
    merged = open_checkpoint(with_adapters(str(model), [adapter]))
    built = load_real_model(merged)(IDS).logits.detach()
    torch.testing.assert_close(built, wanted, rtol=1e-4, atol=1e-4)
    assert (built - plain).abs().max() > 0.1
    for name in merged.tensor_names():
        filled = np.empty(merged.shape(name), np.float32)
        merged.fill(name, filled)
        np.testing.assert_array_equal(filled, merged.tensor(name))


def test_biases_of_products_and_tensors_in_place_of_the_models(tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "model", "qwen2")
    query = "base_model.model.model.layers.0.self_attn.q_proj"
    norm = "base_model.model.model.norm.weight"

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{query}.lora_B.bias"] = torch.ones(len(tensors[f"{query}.lora_B.weight"]))
        tensors[norm] = torch.full(open_checkpoint(model).shape("model.norm.weight"), 0.5)

    adapter = write_adapter(
        tmp_path / "adapter", model, ATTENTION[:1], change, modules_to_save=["norm"], lora_bias=True
    )
    wanted = beside(load_real_model(open_checkpoint(model)), adapter)
    built = load_real_model(open_checkpoint(with_adapters(str(model), [adapter])))(IDS).logits.detach()
    torch.testing.assert_close(built, wanted, rtol=1e-4, atol=1e-4)


def test_two_adapters_add_up(tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "model", "llama")
    one = write_adapter(tmp_path / "one", model)
    two = write_adapter(tmp_path / "two", model, ATTENTION[:1], lambda t: [x.neg_() for x in t.values()], lora_alpha=1)
    base, both = open_checkpoint(model), open_checkpoint(with_adapters(str(model), [one, two]))
    name = f"{ATTENTION[0]}.weight"
    changes = [open_checkpoint(with_adapters(str(model), [a])).tensor(name) - base.tensor(name) for a in (one, two)]
    np.testing.assert_allclose(both.tensor(name), base.tensor(name) + sum(changes), atol=1e-6)
    assert both.name == "one+two"


@full
def test_a_bundle_of_an_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the command line, verified against the merged model; again from the adapter's folder; verified anew."""
    model = tiny.write_model(tmp_path / "model", "llama")
    adapter = write_adapter(tmp_path / "adapter", model)
    flags = [
        "--device", "onnxruntime", "--quantize", "none", "--max-model-len", "32", "--max-num-seqs", "2",
        "--cache-dir", str(tmp_path / "store"), "--json", "-q",
    ]  # fmt: skip
    assert main(["compile", str(model), "--lora", str(adapter), "-o", str(tmp_path / "one"), *flags]) == 0
    capsys.readouterr()
    assert main(["compile", str(adapter), "-o", str(tmp_path / "two"), *flags]) == 0
    assert json.loads(capsys.readouterr().out)["built"] == 0, "it is the same model"
    bundles = [Bundle.open(tmp_path / name) for name in ("one", "two")]
    assert [b.manifest.model["name"] for b in bundles] == ["adapter", "adapter"]
    assert str(tmp_path) not in (tmp_path / "one" / "manifest.json").read_text()
    prompt = [3, 5, 9]
    wanted = load_real_model(open_checkpoint(adapter)).generate(
        torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, 3:].tolist()  # fmt: skip
    with BundleLLM(tmp_path / "one", threads=1) as llm:
        found = llm.generate([prompt], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    assert list(found[0].outputs[0].token_ids) == wanted
    assert main(["verify", str(tmp_path / "one"), "--cache-dir", str(tmp_path / "store")]) == 0


def test_what_an_adapter_holds_is_in_the_digest(tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "model", "llama")
    plain = open_checkpoint(model)
    adapters = [
        write_adapter(tmp_path / "a", model), write_adapter(tmp_path / "b", model, lora_alpha=7),
        write_adapter(tmp_path / "c", model, change=lambda t: [x.add_(1) for x in t.values()]),
    ]  # fmt: skip
    digests = {open_checkpoint(with_adapters(str(model), [a])).digest() for a in adapters}
    assert len(digests | {plain.digest()}) == 4
    assert read_config(adapters[0])["hidden_size"] == plain.config["hidden_size"]


def test_blocks_of_what_is_changed_are_not_the_checkpoints(tmp_path: Path) -> None:
    """Of the demo model, in GGUF's 4-bit blocks: the rest is kept as it is."""
    from llmc.compiler.checkpoint import DEMO

    base = open_checkpoint(DEMO)
    rows, columns = base.shape(f"{ATTENTION[0]}.weight")
    stem = f"base_model.model.{ATTENTION[0]}"
    (tmp_path / "adapter").mkdir()
    save_file(
        {f"{stem}.lora_A.weight": torch.ones(1, columns), f"{stem}.lora_B.weight": torch.ones(rows, 1)},
        tmp_path / "adapter" / "adapter_model.safetensors",
    )
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({**CONFIG, "r": 1, "lora_alpha": 1}))
    merged = open_checkpoint(with_adapters(DEMO, [tmp_path / "adapter"]))
    changed, kept = f"{ATTENTION[0]}.weight", "model.layers.0.self_attn.o_proj.weight"
    assert (merged.stored_form(changed), merged.quantised_blocks(changed)) == (None, None)
    assert merged.unkept(changed) == "changed by an adapter"
    assert merged.stored_form(kept) == base.stored_form(kept) is not None
    np.testing.assert_allclose(merged.tensor(changed), base.tensor(changed) + 1, atol=1e-6)
    assert merged.tokenizer_json() == base.tokenizer_json()


# Bad input

BAD: dict[str, tuple[dict[str, Any], Change, str]] = {
    "another method": ({"peft_type": "IA3"}, lambda _: None, "peft_type is 'IA3', but only LORA can be read"),
    "a changed base": ({"init_lora_weights": "pissa"}, lambda _: None, "is 'pissa', which also changed"),
    "a key that is not known": ({"use_qalora": True}, lambda _: None, "use_qalora is not supported"),
    "a pattern": ({"alpha_pattern": {"(a+)+$": 1}}, lambda _: None, "but only module names can be read"),
    "no alpha": ({"lora_alpha": "x"}, lambda _: None, "lora_alpha is 'x', not a number"),
    "an endless alpha": ({"lora_alpha": 1e999}, lambda _: None, "lora_alpha is inf, not a number"),
    "half of a product": ({}, lambda t: t.pop(next(iter(t))), "but LoRA needs two matrices"),
    "no number": ({}, lambda t: [x.fill_(float("nan")) for x in t.values()], "holds a non-finite value"),
    "another width": (
        {}, lambda t: t.update({n: torch.ones(3, 7) for n in t if n.endswith("A.weight")}), "of another base model",
    ),
    "another rank": (
        {}, lambda t: t.update({n: torch.ones(2, 64) for n in t if n.endswith("A.weight")}), "of another base model",
    ),
    "another layer": (
        {}, lambda t: t.update({n.replace("layers.1", "layers.9"): t.pop(n) for n in list(t)}),
        r"it changes model.layers.9.\S+.weight, but .* has no such tensor",
    ),
    "a longer vocabulary": (
        {}, lambda t: t.update({"base_model.model.lm_head.weight": torch.ones(999, 64)}),
        r"it replaces lm_head.weight by \[999, 64\].* whose vocabulary was changed",
    ),
    "a tensor of nobody": (
        {}, lambda t: t.update({"base_model.model.model.embed_tokens.token_adapter.x": torch.ones(1)}),
        "has no such tensor",
    ),
    "no magnitudes": ({"use_dora": True, "r": 3}, lambda t: [t.pop(n) for n in list(t) if "magnitude" in n],
                      "it has no magnitude per row"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_adapter_is_one_clear_error(tmp_path: Path, case: str) -> None:
    config, change, message = BAD[case]
    model = tiny.write_model(tmp_path / "model", "llama")
    adapter = write_adapter(tmp_path / "adapter", model, change=change, **config)
    with pytest.raises(CheckpointError, match=message):
        merged = open_checkpoint(with_adapters(str(model), [adapter]))
        for name in merged.tensor_names():
            merged.tensor(name)


def test_pickled_weights_and_missing_ones(tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "model", "llama")
    adapter = write_adapter(tmp_path / "adapter", model)
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="pickled weights, which llmc does not load"):
        open_checkpoint(adapter)
    (adapter / "adapter_model.bin").unlink()
    with pytest.raises(CheckpointError, match="no weights"):
        open_checkpoint(adapter)


def test_a_base_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny.write_model(tmp_path / "model", "llama")
    adapter = write_adapter(tmp_path / "adapter", model, base_model_name_or_path=str(tmp_path / "none"))
    with pytest.raises(
        CheckpointError, match=r"this LoRA adapter's base model cannot be opened \(.*\); pass MODEL and --lora"
    ):
        open_checkpoint(adapter)
    itself = write_adapter(tmp_path / "itself", model, base_model_name_or_path=str(tmp_path / "itself"))
    with pytest.raises(CheckpointError, match="is an adapter as well"):
        open_checkpoint(itself)
    nameless = write_adapter(tmp_path / "nameless", model, base_model_name_or_path=None)
    with pytest.raises(CheckpointError, match="names no base model"):
        open_checkpoint(nameless)
    with pytest.raises(CheckpointError, match="not a LoRA adapter: the folder has no"):
        open_checkpoint(with_adapters(str(model), [model]))
    assert main(["compile", "--lora", str(adapter), "-o", str(tmp_path / "out")]) != 0
    assert "is an adapter, but no MODEL is given" in capsys.readouterr().err


def test_a_model_that_embeds_is_refused(tmp_path: Path) -> None:
    """Its weights are read by transformers, which knows nothing of the adapter."""
    from llmc.compiler.frontend.encode import Encode

    model = tiny.write_model(tmp_path / "model", "qwen3")
    adapter = write_adapter(tmp_path / "adapter", model, ATTENTION[:1])
    with pytest.raises(CheckpointError, match="only models that generate can use LoRA adapters"):
        Encode(open_checkpoint(with_adapters(str(model), [adapter])), "embed")


def test_compile_bundle_takes_a_merged_checkpoint(tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "model", "llama")
    merged = open_checkpoint(with_adapters(str(model), [write_adapter(tmp_path / "adapter", model)]))
    options = CompileOptions("onnxruntime", quantize="none", verify="all")
    built = compile_bundle(merged, tmp_path / "b", tiny.tiny_plan(), options, Store(tmp_path / "s"), lambda _: None)
    assert built.verification is not None
    assert built.verification["mean_kl"] < 1e-6
