"""Every command of the documents for this host's CPU runs."""

from __future__ import annotations

import pytest

from tests.docs.conftest import Rehearse
from tests.docs.groups import CPU, units
from tests.tiers import full

pytestmark = full


@pytest.mark.parametrize("unit", units(CPU))
def test_every_command_runs(unit: str, rehearse: Rehearse) -> None:
    rehearse(unit)
