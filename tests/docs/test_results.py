"""Every document and chart shows the figures of benchmarks/results.toml."""

from __future__ import annotations

import re

import pytest

from scripts import results


def test_documents_and_charts_are_written_from_the_results_file() -> None:
    differ = [name for name, text in results.written().items() if (results.ROOT / name).read_text() != text]
    assert not differ, "run python -m scripts.results"


@pytest.mark.parametrize(("ratio", "shown"), [(0.5, "2.0"), (0.64, "1.6"), (0.95, "1.05"), (1.10, "0.91")])
def test_a_ratio_of_times_is_shown_as_a_factor(ratio: float, shown: str) -> None:
    assert results.faster(ratio) == shown


def test_the_readme_is_short_and_the_results_are_current_figures_only() -> None:
    assert len((results.ROOT / "README.md").read_text().splitlines()) <= 130
    words = re.findall(r"\w[^\s|]*", (results.ROOT / "benchmarks/RESULTS.md").read_text())
    assert len(words) <= 2500
