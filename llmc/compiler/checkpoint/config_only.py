"""A configuration alone: what a model is, before there are weights.

The file is a config.json by any name. Beside one that is called config.json, the tokenizer, the chat template and
generation_config.json count as they do in a Hugging Face folder, so that a bundle of it can take texts; weights that
lie there do not.
"""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from llmc.artifacts.digest import digest_bytes
from llmc.artifacts.key import canonical_json
from llmc.compiler.checkpoint.base import CONFIG, Checkpoint, FloatArray, without_place
from llmc.compiler.checkpoint.huggingface import INDEX, HuggingFaceCheckpoint, read_config_file
from llmc.errors import CheckpointError


class ConfigCheckpoint(HuggingFaceCheckpoint):
    """A checkpoint without tensors: `tensor_names` is empty; `shape` and `tensor` raise CheckpointError."""

    format = "config"

    def __init__(self, file: Path, name: str | None = None) -> None:
        together = file.name == CONFIG
        Checkpoint.__init__(self, file.parent if together else file, name or _name(file, together))
        self._file = file
        self._config = read_config_file(file)
        self._shards = {}
        self._owner = {}

    def roles(self) -> dict[str, Path]:
        """The configuration, and what goes with a tokenizer; a path that is the file itself has nothing below it."""
        beside = {name: path for name, path in super().roles().items() if name != INDEX}
        return {**beside, CONFIG: self._file}

    def _value_digest(self, role: str) -> str | None:
        if role == CONFIG:
            return digest_bytes(canonical_json(without_place(self._config)))
        return super()._value_digest(role)

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises CheckpointError."""
        self._refuse()

    def tensor(self, name: str) -> FloatArray:
        """Raises CheckpointError."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise CheckpointError(
            f"{self._file} is a configuration alone: it has no weights; name the folder or .gguf file that has them"
        )


def _name(file: Path, together: bool) -> str:
    return file.resolve().parent.name if together else file.stem
