"""A bundle of llmc on its device, warmed up and captured as a server does; asked as in baselines/engines."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bakeoff.engines import caches
from baselines.engines import bundle


class Engine(bundle.Engine):
    def __init__(self, model: str, threads: int, here: bool, caches_in: str | None = None) -> None:
        caches.use(caches_in)
        super().__init__(model, threads, warm_up=True)
        if here and self.llm.executor.capabilities.in_place_of:
            raise ValueError(
                f"this host has no {self.llm.executor.capabilities.in_place_of}: the bundle would run on the CPU"
            )
