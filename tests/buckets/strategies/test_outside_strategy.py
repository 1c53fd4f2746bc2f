"""A strategy that another package brings: that of docs/adding.md, with nothing in llmc changed."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.commands import ROOT, section

TEXT = section(ROOT / "docs" / "adding.md", "Adding a strategy")


def block(language: str) -> str:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)[0]


def plan(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """The page's command, where the page's package is installed."""
    (command,) = (shlex.split(line) for line in re.findall(r"^\$ llmc (.*)$", TEXT, re.MULTILINE))
    run = [sys.executable, "-c", "import sys; from llmc.cli.main import main; sys.exit(main())", *command, *more]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    return subprocess.run(run, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder of packages, as an installer leaves them, and a model's configuration."""
    (tmp_path / "llmc_octaves.py").write_text(block("python"))
    info = tmp_path / "llmc_octaves-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llmc-octaves\nVersion: 1.0\n")
    ((group, name, value),) = re.findall(r"\[project\.entry-points\.\"([\w.]+)\"\]\n([\w-]+) = \"(.*)\"", block("toml"))
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")
    config = {"model_type": "llama", "max_position_embeddings": 2048, "hidden_size": 64, "vocab_size": 320}
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
    (tmp_path / "config.json").write_text(json.dumps(config | sizes))
    return tmp_path


def test_a_plan_is_built_by_it(installed: Path) -> None:
    ran = plan(installed, "-o", "plan.json")
    assert ran.returncode == 0, ran
    shown = [line for line in TEXT.splitlines() if re.match("prompt query|buckets:", line)]
    assert len(shown) == 2 and set(shown) <= set(ran.stdout.splitlines()), ran.stdout
    built = json.loads((installed / "plan.json").read_bytes())
    assert {query for _, query, _ in built["prompt"]} == {64, 96, 128, 192, 256, 384, 512}


def test_a_variable_that_its_rule_does_not_use_is_reported(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_DECODE_BS_BUCKET_STEP", "16")
    ran = plan(installed)
    assert "VLLM_DECODE_BS_BUCKET_STEP has no effect: the half-octaves strategy has no step" in ran.stdout, ran


def test_without_the_package_its_name_is_refused_with_those_known(installed: Path) -> None:
    (installed / "llmc_octaves-1.0.dist-info" / "entry_points.txt").unlink()
    ran = plan(installed)
    assert ran.returncode == 2 and "unknown bucketing strategy 'half-octaves'; known: exponential" in ran.stderr, ran


def test_a_class_that_cannot_be_imported_is_one_clear_error(installed: Path) -> None:
    (installed / "llmc_octaves.py").write_text("import nothing_of_that_name\n")
    ran = plan(installed)
    assert ran.returncode != 0 and "Traceback" not in ran.stderr and "nothing_of_that_name" in ran.stderr, ran
