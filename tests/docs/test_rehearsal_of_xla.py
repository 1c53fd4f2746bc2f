"""Every command of the documents for XLA, and for what stands on it, runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.conftest import Rehearse
from tests.docs.groups import XLA, paths
from tests.tiers import full

pytestmark = [full, pytest.mark.usefixtures("unoptimised_xla")]


@pytest.mark.parametrize("document", paths(XLA), ids=lambda path: path.stem)
def test_every_command_runs(document: Path, rehearse: Rehearse) -> None:
    rehearse(document)
