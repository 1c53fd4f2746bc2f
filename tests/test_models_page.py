"""The table in docs/models.md is what scripts/models.py writes: one row for each architecture."""

from __future__ import annotations

import pytest

from llmc.compiler.architectures import supported
from scripts import models

PAGE = models.PAGE.read_text()
BEFORE, OWN, BEHIND = models.parts(PAGE)
ROWS = models.recorded(OWN)


def test_each_architecture_has_a_row_and_nothing_else_has() -> None:
    assert list(ROWS) == supported(), "python -m scripts.models NAME writes the missing rows"


@pytest.mark.parametrize("name", list(ROWS))
def test_a_row_names_the_models_and_the_devices_that_are_exceptions(name: str) -> None:
    assert ROWS[name] == models.row(name, ROWS[name][-1]), "python -m scripts.models NAME writes it again"
    assert all(one.partition(": ")[0] in models.USUAL for one in ROWS[name][-1].split("; ") if one)


def test_the_text_between_the_markers_is_the_scripts_to_the_letter() -> None:
    assert models.written(ROWS.values()) == OWN
    assert BEFORE + OWN + BEHIND == PAGE and BEHIND.startswith(models.END)


def test_rows_are_read_as_they_were_written() -> None:
    rows = {"a": ["a", "A", "", ""], "b": ["b", "B, C", "bb", "hpu: no: too wide; xla: no: too deep"]}
    assert models.recorded(models.written(rows.values())) == rows


def test_what_a_device_refuses_fits_a_cell() -> None:
    assert models.cell("a | b\n" + "word " * 30, 20) == "a / b word word …"
