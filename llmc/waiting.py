"""Make torch's OpenMP threads sleep while they wait for each other.

By default they spin. If other programs keep the CPUs busy, spinning threads take time from the thread that they wait
for. A decode step of SmolLM2-135M, replayed operator by operator on two cores with six other processes, took 0.7 to 2.2
s of CPU time with spinning threads and 0.06 s with sleeping ones. A value that the user has set is not changed.
"""

from __future__ import annotations

import os

POLICY = "OMP_WAIT_POLICY"
SLEEP = "passive"
"""The variable's value. OpenMP ignores case, and users write it in capitals."""


def wait_asleep() -> None:
    """Set the policy for this process and its children. It takes effect when torch is imported."""
    os.environ.setdefault(POLICY, SLEEP)


def of_others() -> dict[str, str]:
    """The environment for engines that llmc is compared with; their threads wait as without llmc."""
    return {name: value for name, value in os.environ.items() if (name, value) != (POLICY, SLEEP)}
