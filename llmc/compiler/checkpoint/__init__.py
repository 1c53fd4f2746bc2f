"""Checkpoints: Hugging Face folders, GGUF files and mere configurations, opened to one contract (`base.Checkpoint`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.compiler.architectures.shared.families import family_or_plain
from llmc.compiler.checkpoint.base import ADAPTER_CONFIG, CONFIG, Checkpoint, QuantisedBlocks
from llmc.compiler.checkpoint.resolve import DEMO, locate
from llmc.errors import CheckpointError
from llmc.paths import is_dir, is_file

if TYPE_CHECKING:
    from llmc.compiler.checkpoint.peft_adapter import PeftAdapter

LORA = "::lora="
"""Between a model and an adapter that is merged into it."""
CHOICE = "::adapter="
"""Between a model and NAME=ADAPTER, an adapter that requests choose by that name."""

__all__ = ["DEMO", "Checkpoint", "QuantisedBlocks", "each_place", "open_checkpoint", "read_config", "with_adapters"]


def open_checkpoint(path: str | Path | Checkpoint) -> Checkpoint:
    """Opens a Hugging Face folder, a .gguf file, the demo model (`DEMO`) or a hub name (fetched over a
    network); and a config.json, by any name that ends so, as a checkpoint without weights.

    Reads headers only. A folder with one .gguf and no config.json counts as that file; one of a LoRA adapter is the
    model that it names, with the adapter merged, and MODEL::lora=ADAPTER is MODEL with it; MODEL::adapter=NAME=ADAPTER
    is MODEL with an adapter that requests choose. A checkpoint that is open already comes back as it is. Raises
    CheckpointError.
    """
    if isinstance(path, Checkpoint):
        return path
    whole, *choices = str(path).split(CHOICE)
    model, *adapters = whole.split(LORA)
    opened = _merged(model, adapters) if adapters else _opened(model if choices else path)
    if choices:
        opened = _with_choices(opened, choices)
    opened.asked = str(path)
    return opened


def _merged(model: str | Path, adapters: Sequence[str | Path]) -> Checkpoint:
    from llmc.compiler.checkpoint.lora import LoraCheckpoint

    return LoraCheckpoint(_opened(model), [_adapter(adapter) for adapter in adapters])


def _with_choices(base: Checkpoint, choices: Sequence[str]) -> Checkpoint:
    from llmc.compiler.checkpoint.selectable import SelectableCheckpoint

    named: dict[str, PeftAdapter] = {}
    for choice in choices:
        name, _, adapter = choice.partition("=")
        if name in named:
            raise CheckpointError(f"two adapters are called {name!r} ({named[name].path}, {adapter}); name each anew")
        named[name] = _adapter(adapter)
    return SelectableCheckpoint(base, named)


def _adapter(path: str | Path) -> PeftAdapter:
    from llmc.compiler.checkpoint.peft_adapter import PeftAdapter

    folder, _ = locate(path)
    if not is_file(folder / ADAPTER_CONFIG):
        raise CheckpointError(f"{folder}: not a LoRA adapter: the folder has no {ADAPTER_CONFIG}")
    return PeftAdapter(folder)


def _opened(path: str | Path) -> Checkpoint:
    from llmc.compiler.checkpoint.gguf_header import is_gguf

    found, name = locate(path)
    if _is_adapter(found):
        return _merged(_base_of(found), [found])
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


def with_adapters(
    model: str, adapters: Sequence[str | Path] = (), choices: Sequence[tuple[str, str | Path]] = ()
) -> str:  # fmt: skip
    """The name of a model with LoRA adapters merged into it, and others that requests choose by name, for
    `open_checkpoint`."""
    merged, named = (f"{LORA}{adapter}" for adapter in adapters), (f"{CHOICE}{n}={path}" for n, path in choices)
    return "".join([model, *merged, *named])


def each_place(model: str, place: Callable[[str], str]) -> str:
    """Such a name with `place` of each path in it."""
    whole, *choices = model.split(CHOICE)
    named = [(name, place(path)) for name, _, path in (choice.partition("=") for choice in choices)]
    merged = LORA.join(map(place, whole.split(LORA)))
    return with_adapters(merged, choices=named)


def _is_adapter(path: Path) -> bool:
    return is_file(path / ADAPTER_CONFIG) and not is_file(path / CONFIG)


def _base_of(adapter: Path) -> str:
    from llmc.compiler.checkpoint.huggingface import read_json

    named = read_json(adapter / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not isinstance(named, str) or not named:
        raise CheckpointError(f"{adapter}: a LoRA adapter that names no base model; give MODEL and --lora {adapter}")
    try:
        if _is_adapter(locate(named)[0]):
            raise CheckpointError(f"{named} is an adapter, too")
    except CheckpointError as error:
        raise CheckpointError(
            f"{adapter}: a LoRA adapter, whose base model is not to be had ({error}); give MODEL and --lora {adapter}"
        ) from error
    return named


def read_config(path: str | Path | Checkpoint) -> Mapping[str, Any]:
    """The model config alone, from the same places and from a config.json; needs no weights beside it.

    Takes milliseconds (a GGUF with a large vocabulary: 20). Raises CheckpointError.
    """
    if isinstance(path, Checkpoint):
        return path.config
    if LORA in str(path) or CHOICE in str(path):
        return open_checkpoint(path).config
    from llmc.compiler.checkpoint.gguf_header import is_gguf, read_header

    found, _ = locate(path, config_only=True)
    if _is_adapter(found):
        return open_checkpoint(path).config
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
