"""Convert Hugging Face folders to GGUF files in float32 by llama.cpp's own converters, without a vocabulary.

python tests/oracles/convert_gguf.py LLAMA_CPP FOLDER [FOLDER …]      writes FOLDER.gguf
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
import sys
from pathlib import Path
from typing import Any

import torch


def _without_vocabulary(kind: Any) -> None:
    kind.set_vocab = lambda self: self._set_vocab_none()
    for child in kind.__subclasses__():
        _without_vocabulary(child)


def main() -> None:
    """Convert each folder."""
    sys.path[:0] = [sys.argv[1], f"{sys.argv[1]}/gguf-py"]
    gguf, base = importlib.import_module("gguf"), importlib.import_module("conversion.base")
    for module in pkgutil.iter_modules(importlib.import_module("conversion").__path__):
        importlib.import_module(f"conversion.{module.name}")
    logging.disable(logging.WARNING)
    _without_vocabulary(base.TextModel)
    for name in sys.argv[2:]:
        folder = Path(name)
        architecture = base.get_model_architecture(base.ModelBase.load_hparams(folder, False), base.ModelType.TEXT)
        kind = base.ModelBase.from_model_architecture(architecture, model_type=base.ModelType.TEXT)
        with torch.inference_mode():
            kind(folder, gguf.LlamaFileType.ALL_F32, Path(f"{folder}.gguf"), eager=True).write()


main()
