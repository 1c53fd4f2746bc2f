"""kill −9 just before a system call, all through an operation: nothing is served wrong, lost or wedged (P1, P7).

Every few calls are hit here; `python benchmarks/faults.py` hits each one, with strace.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.artifacts.faults.kills import SCENARIOS
from tests.artifacts.helpers import child, finish
from tests.tiers import default_cases

FEWEST_CALLS = 20


@default_cases(3)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_kill_at_any_system_call_is_healed_by_the_next_run(tmp_path: Path, scenario: str) -> None:
    script = "import sys; from pathlib import Path; from tests.artifacts.faults import kills; "
    script += "kills.main(sys.argv[1], Path(sys.argv[2]))"
    found = json.loads(finish(child(script, scenario, tmp_path)))
    assert found["calls"] > FEWEST_CALLS, "it went all through"
    assert found["leftovers"] == 0
