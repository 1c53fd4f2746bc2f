"""One count of compilations, wherever it is shown: of a bundle whose executables this host still has to finish."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmc.artifacts.bundle.manifest import read_manifest
from llmc.runtime.llm import BundleLLM
from tests.artifacts.helpers import REPO
from tests.cli.helpers import Llmc
from tests.manifests import edit_manifest
from tests.server.live import Live
from tests.tiers import full


@pytest.fixture
def unfinished(bundle: Path) -> Path:
    """The bundle, as if its device had not been there."""

    def portable(manifest: dict[str, Any]) -> None:
        for executable in manifest["executables"]:
            executable["state"] = "portable"

    edit_manifest(bundle, portable)
    return bundle


def test_every_place_shows_the_executor_s_count(llmc: Llmc, unfinished: Path) -> None:
    buckets = len(read_manifest(unfinished).executables)
    with BundleLLM(unfinished) as llm:
        llm.executor.open_all()
        assert llm.compilations == llm.core.stats.compilations == llm.executor.compilations.count == buckets
    with Live(unfinished) as server:
        server.ready()
        assert server.events[-1].compilations == buckets  # type: ignore[attr-defined]
        assert server.stats.compilations == server.gauge("unplanned_compile_total") == buckets
        server.complete(prompt="ab")
        assert server.gauge("unplanned_compile_total") == buckets
    ran = llmc("generate", unfinished, "--prompt", "a", "--max-tokens", 3, "--ignore-eos")
    assert re.search(r"compilations while serving: 2$", ran.err, re.M), "one prompt bucket, one of decode"


@full
def test_requested_to_check_recompilation_no_command_goes_on_after_one(
    llmc: Llmc, unfinished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_XLA_CHECK_RECOMPILATION", "1")
    said = llmc("generate", unfinished, "--prompt", "a", "-q").failed(3)
    assert "compiled" in said and "VLLM_XLA_CHECK_RECOMPILATION requests an error" in said
    clean = {k: v for k, v in os.environ.items() if not k.startswith("COV")}
    serve = [sys.executable, "-m", "llmc", "serve", str(unfinished), "--port", "0"]
    done = subprocess.run(
        serve, env={**clean, "PYTHONPATH": str(REPO)}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 3, done.stderr
    assert "compiled when the bundle was opened, and VLLM_XLA_CHECK_RECOMPILATION requests" in done.stderr
