"""docs/models.md is what scripts/models.py writes: a line for each family there is, sizes as llmc estimates them."""

from __future__ import annotations

import pytest

from llmc.compiler.architectures import supported
from scripts import models

PAGE = models.PAGE.read_text()
ROWS = models.recorded(PAGE)


def test_each_family_has_a_line_and_nothing_else_has() -> None:
    assert list(ROWS) == supported(), "python -m scripts.models NAME writes the missing lines"


@pytest.mark.parametrize("name", list(ROWS))
def test_a_line_says_what_the_family_and_its_sizes_say(name: str) -> None:
    devices = ROWS[name][1 : 1 + len(models.DEVICES)]
    assert ROWS[name] == models.row(name, devices), "python -m scripts.models NAME writes it again"
    assert devices[0] in ("kernels", "operators") or devices[0].startswith("no: ")
    assert all(outcome == "yes" or outcome.startswith("no: ") for outcome in devices[1:])


def test_the_page_is_the_scripts_to_the_letter() -> None:
    assert models.written(ROWS.values()) == PAGE


def test_what_a_device_refuses_fits_a_cell() -> None:
    assert models.cell("a | b\n" + "word " * 30, 20) == "a / b word word …"
