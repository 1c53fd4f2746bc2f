"""Checkpoints: Hugging Face folders, GGUF files and mere configurations, opened to one contract (`base.Checkpoint`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmc.compiler.architectures.shared.families import family_or_plain
from llmc.compiler.checkpoint.base import CONFIG, Checkpoint, QuantisedBlocks
from llmc.compiler.checkpoint.resolve import DEMO, locate
from llmc.errors import CheckpointError
from llmc.paths import is_dir, is_file

__all__ = ["DEMO", "Checkpoint", "QuantisedBlocks", "open_checkpoint", "read_config"]


def open_checkpoint(path: str | Path | Checkpoint) -> Checkpoint:
    """Opens a Hugging Face folder, a .gguf file, the demo model (`DEMO`) or a hub name (fetched over a
    network); and a config.json, by any name that ends so, as a checkpoint without weights.

    Reads headers only. A folder with one .gguf and no config.json counts as that file; a checkpoint that is open
    already comes back as it is. Raises CheckpointError.
    """
    if isinstance(path, Checkpoint):
        return path
    opened = _opened(path)
    opened.asked = str(path)
    return opened


def _opened(path: str | Path) -> Checkpoint:
    from llmc.compiler.checkpoint.gguf_header import is_gguf

    found, name = locate(path)
    found = _inside(found)
    if is_dir(found):
        from llmc.compiler.checkpoint.huggingface import HuggingFaceCheckpoint, read_config_file

        experts = family_or_plain(read_config_file(found / CONFIG, family_or_plain)).experts
        if experts is None:
            return HuggingFaceCheckpoint(found, name, family_or_plain)
        from llmc.compiler.checkpoint.experts import ExpertsCheckpoint

        return ExpertsCheckpoint(found, name, family_or_plain, experts.stored, experts.count)
    if found.suffix == ".gguf" or is_gguf(found):
        from llmc.compiler.checkpoint.gguf import GgufCheckpoint

        return GgufCheckpoint(found, name)
    if found.suffix == ".json":
        from llmc.compiler.checkpoint.huggingface import ConfigCheckpoint

        return ConfigCheckpoint(found, name, family_or_plain)
    raise CheckpointError(
        f"{found}: not a checkpoint: neither a GGUF file nor a folder; for a Hugging Face model pass the "
        "folder that holds config.json and the safetensors"
    )


def read_config(path: str | Path | Checkpoint) -> Mapping[str, Any]:
    """The model config alone, from the same places and from a config.json; needs no weights beside it.

    Takes milliseconds (a GGUF with a large vocabulary: 20). Raises CheckpointError.
    """
    if isinstance(path, Checkpoint):
        return path.config
    from llmc.compiler.checkpoint.gguf_header import is_gguf, read_header

    found, _ = locate(path, config_only=True)
    found = _inside(found)
    if found.suffix == ".gguf" or is_gguf(found):
        from llmc.compiler.checkpoint.gguf_config import build_config

        return build_config(read_header(found))
    from llmc.compiler.checkpoint.huggingface import read_config_file

    return read_config_file(found / CONFIG if is_dir(found) else found, family_or_plain)


def _inside(path: Path) -> Path:
    """A file or a folder with config.json, unchanged; for a folder without one, its single .gguf file."""
    if not is_dir(path) or is_file(path / CONFIG):
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        raise CheckpointError(f"{path}: holds {len(files)} GGUF files; pass one, e.g. {files[0]}")
    raise CheckpointError(f"{path}: not a checkpoint: the folder has neither {CONFIG} nor a .gguf file")
