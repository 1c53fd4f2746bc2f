"""Every command of the documents for OpenVINO runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.conftest import Rehearse
from tests.docs.groups import OPENVINO, paths
from tests.tiers import full

pytestmark = full


@pytest.mark.parametrize("document", paths(OPENVINO), ids=lambda path: path.stem)
def test_every_command_runs(document: Path, rehearse: Rehearse) -> None:
    rehearse(document)
