"""First minutes of those who bring something of their own: every command runs and prints what the page says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.compiler import tiny
from tests.docs.commands import ROOT
from tests.docs.running import Page, runs
from tests.tiers import full

pytestmark = full


def traffic(here: Path) -> None:
    """A requests.csv."""
    shutil.copy(ROOT / "tests" / "data" / "azure_conv_sample.csv", here / "requests.csv")


def model(here: Path) -> None:
    """A model, here of a few layers."""
    config = tiny.write_model(here / "model", "llama") / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 256}))


@pytest.mark.parametrize(("name", "bring"), [("tune-vllm", traffic), ("ci", model)])
def test_what_a_page_shows_runs_and_prints_that(name: str, bring: Callable[[Path], None], tmp_path: Path) -> None:
    page = Page(ROOT / "docs" / f"{name}.md", tmp_path, tmp_path / "cache")
    bring(page.folder)
    commands = runs(page)
    assert any(command.startswith("llmc deploy ") for command in commands[-2:]), "it ends with something deployed"
