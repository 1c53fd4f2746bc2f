"""Compute in a child process how much padding another plan would save (buckets/planner/replanning.py)."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmc.buckets.plan import Plan

TIMEOUT_S = 120.0
NICE = 10
_MODULE = "llmc.buckets.planner.replanning"


class Replanner:
    """Runs one process at a time; concurrent callers share its result."""

    def __init__(self) -> None:
        self._running: asyncio.Task[dict[str, Any]] | None = None

    async def offer(self, plan: Plan, metrics: str) -> dict[str, Any]:
        """Return {"offer": Offer.to_dict() or None} or {"error": reason}."""
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(_run(plan, metrics))
        return await asyncio.shield(self._running)


async def _run(plan: Plan, metrics: str) -> dict[str, Any]:
    child = await asyncio.create_subprocess_exec(
        "nice", "-n", str(NICE), sys.executable, "-m", _MODULE, stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        async with asyncio.timeout(TIMEOUT_S):
            reported, _ = await child.communicate(json.dumps({"plan": plan.to_dict(), "metrics": metrics}).encode())
    except TimeoutError:
        return {"error": f"planning took more than {TIMEOUT_S:.0f} s; use llmc plan --traffic"}
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode:
        return {"error": f"planning ended with {child.returncode}"}
    found: dict[str, Any] = json.loads(reported)
    return found
