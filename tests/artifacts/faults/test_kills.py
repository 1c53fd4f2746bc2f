"""kill −9 just before each system call, one after the other: nothing is served wrong, lost or wedged (P1, P7)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.artifacts.faults.kills import SCENARIOS
from tests.artifacts.helpers import child, finish

FEWEST_CALLS = 20


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_kill_at_any_system_call_is_healed_by_the_next_run(tmp_path: Path, scenario: str) -> None:
    script = "import sys; from pathlib import Path; from tests.artifacts.faults import kills; "
    script += "kills.main(sys.argv[1], Path(sys.argv[2]))"
    found = json.loads(finish(child(script, scenario, tmp_path)))
    assert found["calls"] > FEWEST_CALLS, "every call was met"
    assert found["leftovers"] == 0
