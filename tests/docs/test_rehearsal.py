"""A document whose command fails, or prints another error than it shows, fails its rehearsal."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.conftest import Rehearse
from tests.tiers import default_cases

SAYS = "llmc: error: gone: not a bundle (no such file or folder); make one with `llmc compile`"


@default_cases(2)
@pytest.mark.parametrize(
    ("shown", "failed"),
    [
        ("$ llmc plan show gone.json", r"page\.md:2 llmc plan show gone\.json\s+2\s+llmc: error: "),
        ("$ llmc serve gone", r"page\.md:2 llmc serve gone\s+1\s+llmc: "),
        ("$ llmc completion bash\nllmc: error: no such shell", r"page\.md:2 llmc completion bash\s+0\s"),
        ("$ llmc cache verify gone\nllmc: error: gone: is damaged", r"page\.md:2 llmc cache verify gone\s+5\s"),
    ],
)
def test_what_is_not_as_shown_is_named(shown: str, failed: str, rehearse: Rehearse, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(f"```\n{shown}\n```\n")
    with pytest.raises(AssertionError, match=failed):
        rehearse(tmp_path / "page.md")


def test_an_error_that_is_shown_and_a_variable_that_is_set_are_as_shown(rehearse: Rehearse, tmp_path: Path) -> None:
    lines = (
        f"$ llmc cache verify gone\n{SAYS}\n$ export LLMC_TRUSTED_KEYS=mine\n$ llmc cache trust release.pub --name us\n"
    )
    (tmp_path / "page.md").write_text(f"```\n{lines}```\n")
    here = rehearse(tmp_path / "page.md")
    assert (here / "mine").is_dir()
