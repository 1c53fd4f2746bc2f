"""Threads that wait for each other sleep: those of torch, whose operators are spread over threads by OpenMP.

By default they spin. Where something else keeps a CPU busy they so burn the time that the thread they wait for needs: a
decode step of SmolLM2-135M, replayed operator by operator on two cores with six other processes, took 0.7 to 2.2 s of
processor time, and 0.06 s where they sleep. What the user has set stays as it is.
"""

from __future__ import annotations

import os

POLICY = "OMP_WAIT_POLICY"
SLEEP = "passive"
"""As OpenMP reads it in any case; users write it in capitals."""


def wait_asleep() -> None:
    """Set the policy, for this process and its children; it counts from when torch is imported."""
    os.environ.setdefault(POLICY, SLEEP)


def of_others() -> dict[str, str]:
    """The environment of engines that llmc is compared with: they wait as they do without it."""
    return {name: value for name, value in os.environ.items() if (name, value) != (POLICY, SLEEP)}
