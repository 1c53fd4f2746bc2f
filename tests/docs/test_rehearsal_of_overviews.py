"""Every command of the documents that show all of llmc at once runs."""

from __future__ import annotations

import pytest

from tests.docs.conftest import Rehearse
from tests.docs.groups import OVERVIEWS, units
from tests.tiers import full

pytestmark = full


@pytest.mark.parametrize("unit", units(OVERVIEWS))
def test_every_command_runs(unit: str, rehearse: Rehearse) -> None:
    rehearse(unit)
