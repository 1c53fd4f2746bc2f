"""Checkpoints with a vision part: the text part computes what the whole model does with text alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

import llmc
from llmc.cli.results import print_result
from llmc.compiler.architectures.shared.wrappers import WRAPPERS
from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.frontend.consumed import require_consumed
from llmc.compiler.frontend.real_model import load_real_model
from llmc.errors import CheckpointError
from llmc.testing.toy import tokenizer_json
from tests.compiler import tiny
from tests.models.texts import NEW, PROMPTS

SIGLIP = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
IMAGES = {"image_size": 8, "patch_size": 4}
_QWEN = {
    "vision_config": {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4,
        "out_hidden_size": 64, "num_position_embeddings": 16,
    },
    "tie_word_embeddings": False,
}  # fmt: skip
VISION: dict[str, dict[str, Any]] = {
    "gemma3": {"vision_config": {**SIGLIP, **IMAGES, "model_type": "siglip_vision_model"}, "mm_tokens_per_image": 4},
    "gemma4": {
        "vision_config": {
            **SIGLIP, "head_dim": 8, "num_key_value_heads": 2, "global_head_dim": 8, "patch_size": 4,
            "position_embedding_size": 16, "pooling_kernel_size": 2,
        },
        "audio_config": None,
    },
    "mistral3": {"vision_config": {**SIGLIP, **IMAGES, "model_type": "pixtral", "head_dim": 8}},
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
}  # fmt: skip


@torch.no_grad()
def write(folder: Path, wrapper: str) -> Any:
    """A whole model with random weights, as transformers saves it, and that model."""
    text = tiny.config(WRAPPERS[wrapper].text)
    torch.manual_seed(3)
    config = AutoConfig.for_model(wrapper, text_config=text, **VISION[wrapper])
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        parameter.normal_(0, 0.15).add_(1 if "norm" in name else 0)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer_json())
    return model


@torch.no_grad()
def greedy(model: Any, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(NEW):
        tokens.append(int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def rename(folder: Path, *changes: tuple[str, str]) -> None:
    """Change the beginnings of names of tensors."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for old, new in changes:
        tensors = {new + name[len(old) :] if name.startswith(old) else name: t for name, t in tensors.items()}
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize("wrapper", sorted(WRAPPERS))
def test_the_text_part_gives_the_logits_of_the_whole(wrapper: str, tmp_path: Path) -> None:
    whole = write(tmp_path, wrapper)
    checkpoint = open_checkpoint(tmp_path)
    require_consumed(checkpoint)
    assert checkpoint.config["model_type"] == WRAPPERS[wrapper].text
    assert set(checkpoint.left_out) <= set(WRAPPERS[wrapper].others)
    assert checkpoint.left_out
    with torch.no_grad():
        tokens = torch.tensor([PROMPTS[2]])
        wanted = whole(input_ids=tokens, use_cache=False).logits
        assert torch.allclose(load_real_model(checkpoint)(tokens, use_cache=False).logits, wanted, atol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        (("model.language_model.", "language_model.model."), ("lm_head.", "language_model.lm_head."),
         ("model.vision_tower.", "vision_tower."), ("model.multi_modal_projector.", "multi_modal_projector.")),
        (("language_model.model.", "model.language_model."), ("language_model.lm_head.", "lm_head."),
         ("vision_tower.", "model.vision_tower."), ("multi_modal_projector.", "model.multi_modal_projector.")),
    ],
    ids=["names before transformers 4.52", "names since"],
)  # fmt: skip
def test_older_and_newer_names_are_read(changes: tuple[tuple[str, str], ...], tmp_path: Path) -> None:
    write(tmp_path, "mistral3")
    before = open_checkpoint(tmp_path)
    rename(tmp_path, *changes)
    after = open_checkpoint(tmp_path)
    require_consumed(after)
    assert after.tensor_names() == before.tensor_names()
    assert after.left_out == before.left_out


def test_a_folder_compiles_to_the_whole_models_text_and_the_summary_names_what_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = write(tmp_path / "model", "gemma3")
    result = llmc.compile(
        str(tmp_path / "model"), tmp_path / "bundle", plan=tiny.tiny_plan(), quantize="none", device="onnxruntime"
    )
    print_result(result, False)
    said = next(line for line in capsys.readouterr().out.splitlines() if "text model" in line)
    assert said.startswith("only the checkpoint's text model is compiled; left out: ")
    assert "multi_modal_projector (2 tensors)" in said
    with llmc.LLM(str(tmp_path / "bundle")) as llm:
        sampling = llmc.SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
        built = llm.generate(list(PROMPTS), sampling)
    assert [output.outputs[0].token_ids for output in built] == [greedy(whole, prompt) for prompt in PROMPTS]


def test_tensors_of_a_module_that_is_not_known_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "mistral3")
    rename(tmp_path, ("model.vision_tower.", "model.ears."), ("vision_tower.", "ears."))
    with pytest.raises(CheckpointError, match=r"takes the tensors (model\.)?ears\."):
        require_consumed(open_checkpoint(tmp_path))


def test_a_configuration_without_its_text_part_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral3", "text_config": None}))
    with pytest.raises(CheckpointError, match="a mistral3 model needs an object text_config, not None"):
        open_checkpoint(tmp_path)


def test_published_gemma_3_leaves_sizes_of_its_text_part_to_defaults(tmp_path: Path) -> None:
    """google/gemma-3-4b-it's text_config, in its members."""
    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }  # fmt: skip
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106]}))
    config = open_checkpoint(file).config
    assert (config["vocab_size"], config["num_attention_heads"], config["head_dim"]) == (262208, 8, 256)
    assert config["tie_word_embeddings"] is True
    assert config["eos_token_id"] == [1, 106]
