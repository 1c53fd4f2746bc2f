"""Every command of the documents about devices that are not here runs."""

from __future__ import annotations

import pytest

from tests.docs.conftest import Rehearse
from tests.docs.groups import DEVICES, units
from tests.tiers import full

pytestmark = full


@pytest.mark.parametrize("unit", units(DEVICES))
def test_every_command_runs(unit: str, rehearse: Rehearse) -> None:
    rehearse(unit)
