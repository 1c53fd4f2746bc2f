"""The executables of a bundle, one by one: seconds and bytes of each capture or load, and what was predicted."""

from __future__ import annotations

import time
from typing import Any

from llmc.runtime.bundle import Bundle
from llmc.runtime.startup.capturing import CaptureChoice, Capturing
from llmc.runtime.startup.opening import EngineOptions, open_executor
from llmc.runtime.startup.outcome import WarmUpOutcome
from llmc.runtime.startup.warming import Warming


class Engine:
    def __init__(self, model: str, threads: int) -> None:
        self._bundle = Bundle.open(model)
        self._options = EngineOptions(threads, enable_prefix_caching=False)

    def graphs(self) -> dict[str, Any]:
        """A row for each decode bucket; bytes are None where nothing states them, as on a CPU."""
        executor = open_executor(self._bundle, self._options)
        plan = self._bundle.plan
        capturing = Capturing.of(executor, plan, CaptureChoice())
        outcome = WarmUpOutcome(executor, Warming(executor, plan), capturing)
        last, took = time.perf_counter(), {}

        def on_progress(ran: Any, *_: int) -> None:
            nonlocal last
            now = time.perf_counter()
            if capturing is not None:
                took[str(ran)] = now - last
            last = now

        try:
            outcome.run(on_progress)
            if capturing is None:
                rows = [
                    {"bucket": str(b), "seconds": ran.seconds - outcome.again[b].seconds, "bytes": None,
                     "predicted": None}
                    for b, ran in outcome.first.items() if b.phase == "decode" and b in outcome.again
                ]  # fmt: skip
                return {"how": "first run less a replay", "graphs": rows, "uncaptured": []}
            found = capturing.outcome
            assert found is not None
            decode = next(phase for phase in found.phases if phase.phase == "decode")
            rows = [
                {"bucket": str(g.bucket), "seconds": took[str(g.bucket)], "bytes": g.size, "predicted": g.predicted}
                for g in decode.captured
            ]
            return {
                "how": "captured",
                "graphs": rows,
                "uncaptured": [f"{u.bucket}: {u.why}" for u in decode.uncaptured],
            }
        finally:
            executor.close()
