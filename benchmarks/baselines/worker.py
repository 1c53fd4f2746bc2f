"""A contender: an engine over a model, in a process of its own."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from llmc.bench import worker

ENGINES = Path(__file__).parent / "engines"


@dataclass(frozen=True)
class Contender:
    """What is compared: an engine (a file of engines/) over a model, in `python`.

    `kind`: a bundle of llmc, or a baseline. `bits` of a weight, nominally; None where it is not known. `versions` of
    what it runs on. `variant` is the baseline's, or how a bundle was quantised. `searched`: options of the engine that
    tuning.py chooses a value for.
    """

    name: str
    kind: Literal["llmc", "baseline"]
    engine: str
    python: str
    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    bits: float | None = None
    variant: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    searched: Mapping[str, Sequence[Any]] = field(default_factory=dict)


class Worker(worker.Worker):
    """One contender's process, with `threads` threads; `more` are options of this opening alone."""

    def __init__(self, contender: Contender, threads: int, log: Path, **more: Any) -> None:
        self.contender = contender
        options = {"model": contender.model, "threads": threads, **contender.options, **more}
        engine = ENGINES / f"{contender.engine}.py"
        super().__init__(contender.name, worker.command(contender.python or sys.executable, engine, options), log)
