"""Tiny random encoders on disk: every family, with the files that sentence-transformers would write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from llmc.compiler.architectures.encoders import ENCODERS, encoder_architecture
from llmc.testing.toy import VOCAB, tokenizer_json

ARCHITECTURES = sorted(ENCODERS)


def config_of(name: str, **more: Any) -> dict[str, Any]:
    """The tiny configuration of a family."""
    return {
        "model_type": name.replace("xlm_r", "xlm-r"),
        "vocab_size": VOCAB,
        **encoder_architecture({"model_type": name}).tiny,
        **more,
    }


def write_encoder(
    folder: Path, name: str, task: str = "embed", *, labels: int = 1, modules: bool = True, **more: Any
) -> Path:
    """A checkpoint of family `name`: to embed with mean pooling and normalisation, or to score with `labels`."""
    fields = config_of(name, **more)
    torch.manual_seed(0)
    kind = fields.pop("model_type")
    config = AutoConfig.for_model(kind, **fields, **({"num_labels": labels} if task == "score" else {}))
    built: Any = AutoModel if task == "embed" else AutoModelForSequenceClassification
    model = built.from_config(config)
    for parameter in model.parameters():  # biases and norms of a fresh model are 0 and 1, and would hide a mistake
        parameter.data += torch.randn_like(parameter) * 0.1
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer_json())
    if task == "embed" and modules:
        write_modules(folder, int(fields.get("hidden_size", fields.get("dim", 0))))
    return folder


def write_modules(folder: Path, width: int, pooling: str = "mean", normalize: bool = True, **config: Any) -> None:
    """modules.json and the folders that it names, in the form that most checkpoints have."""
    names = {"": "Transformer", "1_Pooling": "Pooling", **({"2_Normalize": "Normalize"} if normalize else {})}
    entries = [
        {"idx": at, "name": str(at), "path": index, "type": f"sentence_transformers.models.{kind}"}
        for at, (index, kind) in enumerate(names.items())
    ]
    (folder / "modules.json").write_text(json.dumps(entries))
    for index in list(names)[1:]:
        (folder / index).mkdir(exist_ok=True)
    modes = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens", "lasttoken": "lasttoken"}
    switches = {f"pooling_mode_{key}": mode == pooling for mode, key in modes.items()}
    said = {"word_embedding_dimension": width, **switches, **config}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(said))
