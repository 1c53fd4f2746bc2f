"""Every command of the documents for XLA, and for what stands on it, runs."""

from __future__ import annotations

import pytest

from tests.docs.conftest import Rehearse
from tests.docs.groups import XLA, units
from tests.tiers import full

pytestmark = [full, pytest.mark.usefixtures("unoptimised_xla")]


@pytest.mark.parametrize("unit", units(XLA))
def test_every_command_runs(unit: str, rehearse: Rehearse) -> None:
    rehearse(unit)
