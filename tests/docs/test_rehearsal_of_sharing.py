"""Every command of the documents about what leaves this host runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.conftest import Rehearse
from tests.docs.groups import SHARING, paths
from tests.tiers import full

pytestmark = full


@pytest.mark.parametrize("document", paths(SHARING), ids=lambda path: path.stem)
def test_every_command_runs(document: Path, rehearse: Rehearse) -> None:
    rehearse(document)
