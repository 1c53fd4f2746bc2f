"""A real vLLM on this CPU, in the environment of `make real-vllm`, with a model of two layers."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.checkpoint.folder_writer import write_folder
from tests.server.over_ray import free_port
from tests.tiers import require_mark

LAYERS = 2
STARTS_WITHIN = 300
"""Seconds in which a server starts, at most."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    require_mark(items, Path(__file__).parent, "real_server")


@dataclass(frozen=True)
class Server:
    """A server that answers, and the file that it logs to."""

    url: str
    log: Path

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def engine_seconds(self) -> float:
        """Seconds of vLLM's own line "init engine … took"."""
        match = re.search(r"init engine .* took ([\d.]+) s", self.said)
        assert match is not None, self.said[-4000:]
        return float(match[1])


@dataclass(frozen=True)
class Vllm:
    """The Python of an environment with vLLM, and the model that it serves."""

    python: Path
    model: Path

    @contextmanager
    def serve(self, words: Sequence[str], variables: Mapping[str, str], log: Path) -> Iterator[Server]:
        """Start `vllm serve MODEL` with these arguments and variables; it ends with the block."""
        port = free_port()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "LLMC_"))}
        quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        command = [str(self.python.with_name("vllm")), "serve", str(self.model), "--port", str(port), *words]
        with log.open("w") as into:
            server = subprocess.Popen(
                command, env={**kept, **quiet, **variables}, stdout=into, stderr=subprocess.STDOUT,
                cwd=log.parent, start_new_session=True,
            )  # fmt: skip
        try:
            end = time.monotonic() + STARTS_WITHIN
            while "Application startup complete" not in log.read_text(errors="replace"):
                assert server.poll() is None and time.monotonic() < end, log.read_text(errors="replace")[-4000:]
                time.sleep(0.5)
            yield Server(f"http://127.0.0.1:{port}", log)
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(60)


@pytest.fixture(scope="session")
def vllm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Vllm:
    python = request.config.getoption("--other-python")
    if python is None:
        raise pytest.UsageError("name vLLM's Python with --other-python (make real-vllm)")
    return Vllm(python.absolute(), two_layers(tmp_path_factory.mktemp("model") / "two-layers"))


def two_layers(folder: Path) -> Path:
    """The demo model's first layers, with its own tokenizer, as a Hugging Face folder."""
    write_folder(open_checkpoint("smollm2-demo"), folder)
    tensors = load_file(folder / "model.safetensors")
    layer = re.compile(r"\blayers\.(\d+)\.")
    kept = {name: value for name, value in tensors.items()
            if (match := layer.search(name)) is None or int(match[1]) < LAYERS}  # fmt: skip
    save_file(kept, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": LAYERS}))
    return folder
