"""Every command of the documents for this host's CPU runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.conftest import Rehearse
from tests.docs.groups import CPU, paths
from tests.tiers import full

pytestmark = full


@pytest.mark.parametrize("document", paths(CPU), ids=lambda path: path.stem)
def test_every_command_runs(document: Path, rehearse: Rehearse) -> None:
    rehearse(document)
