"""The notebook of docs/ runs from nothing on real weights, and each cell shows what the notebook says it shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.docs.commands import ROOT
from tests.tiers import full

TITLE = re.compile("<strong>(.*?)</strong>")


def titles(notebook: Any) -> list[str]:
    """What each cell of code shows, in words: the title of an object, or the printed text."""
    return [
        "".join(TITLE.findall(shown["data"]["text/html"])) if "data" in shown else shown["text"]
        for cell in notebook.cells
        if cell.cell_type == "code"
        for shown in cell.outputs
        if shown.get("name") != "stderr"
    ]


@full
def test_every_cell_runs_and_shows_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    said = nbformat.read(ROOT / "docs" / "notebook.ipynb", as_version=4)
    found = nbformat.read(ROOT / "docs" / "notebook.ipynb", as_version=4)
    for cell in found.cells:
        cell.pop("outputs", None)
    NotebookClient(found, timeout=1200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    plan, padded_share, better, less, bundle, bench, answer = titles(found)
    assert [plan, padded_share, better, less, bundle, bench] == titles(said)[:-1]
    assert [float(percent) for percent in re.findall(r"([\d.]+)%", less)] < [
        float(percent) for percent in re.findall(r"([\d.]+)%", padded_share)
    ], "a plan for these requests pads less"
    assert "Gravity" in answer, bench
