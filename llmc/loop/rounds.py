"""One round: record, evaluate, plan, compile, swap. Each stage may end it, and says why.

The gain is what the new plan saves of a phase's padded tokens, on the same traffic: 1 - new / old. The costs of the two
phases are in different units (buckets/cost.py), so they are not added: a plan is worth it where it saves at least
`min_gain` of one phase, and costs the other less than that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from llmc.errors import InputError, LlmcError

if TYPE_CHECKING:
    from llmc.artifacts.store.store import Store
    from llmc.buckets.plan import Plan
    from llmc.compiler.checkpoint.base import Checkpoint
    from llmc.compiler.options import CompileOptions
    from llmc.compiler.pipeline.compile import Event
    from llmc.loop.client import Client
    from llmc.loop.folder import Folder
    from llmc.runtime.bundle import Bundle
    from llmc.settings import Settings

Outcome = Literal["swapped", "ready", "nothing", "planned", "stopped", "refused", "failed", "interrupted"]
LIMITS = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "max_prompt_len")


class OverBudgetError(LlmcError):
    """A compile took longer than a round may; what is done is in the store."""


@dataclass(frozen=True)
class Asked:
    """What a loop was told. Times in seconds.

    `client`: the server; or None, and `bundle` is what is re-planned. `traffic`: a recording; None: the server's own
    histograms since the last round. `budget_s`: compile time of a round. `min_gain`: see above, 0 … 1. `max_graphs`:
    None: as many as the bundle has now. `model`: its checkpoint; None: where it was compiled from.
    """

    folder: Folder
    client: Client | None = None
    bundle: str | None = None
    traffic: str | None = None
    budget_s: float | None = None
    min_gain: float = 0.05
    max_graphs: int | None = None
    model: str | None = None
    dry_run: bool = False


@dataclass
class Round:
    """What a round did, as far as it came: `stage` is the last one that began, `why` it ended there.

    `gain` by phase; `built` and `reused` executables; seconds of the compile, and the estimate of it.
    """

    time: float
    stage: str = "record"
    outcome: Outcome = "interrupted"
    why: str = ""
    requests: int = 0
    gain: dict[str, float] = field(default_factory=dict)
    graphs: int = 0
    estimated_s: float | None = None
    compile_s: float | None = None
    built: int = 0
    reused: int = 0
    bundle: str | None = None
    digest: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """As the log holds it."""
        return asdict(self)

    def ended(self, outcome: Outcome, why: str = "") -> Round:
        """It is over."""
        self.outcome, self.why = outcome, why
        return self


def run_round(
    asked: Asked, store: Store, settings: Settings, report: Callable[[Event], None], now: float | None = None
) -> Round:
    """Do one round, and log it unless it is a dry run. The server is left as it was unless it took the new bundle.

    Raises KeyboardInterrupt, logged; errors of llmc end the round as "failed", or "refused" by the server.
    """
    done = Round(time.time() if now is None else now)
    metrics: str | None = None
    try:
        if asked.traffic is None:
            metrics = _client(asked).metrics()
        _do(asked, store, settings, report, done, metrics)
    except OverBudgetError as error:
        done.ended("stopped", str(error))
    except LlmcError as error:
        done.ended("refused" if done.stage == "swap" else "failed", str(error))
    except BaseException:
        asked.folder.over(None, done.to_dict())
        raise
    if not asked.dry_run:
        asked.folder.over(None if done.outcome in ("failed", "stopped") else metrics, done.to_dict())
    return done


def _do(
    asked: Asked, store: Store, settings: Settings, report: Callable[[Event], None], done: Round, metrics: str | None
) -> Round:
    from llmc.buckets.replanning import gains
    from llmc.buckets.replay import replay
    from llmc.buckets.traffic.source import Traffic
    from llmc.compiler.pipeline.compilation import Compilation
    from llmc.runtime.bundle import Bundle

    folder, client = asked.folder, asked.client
    running = Bundle.open((client.bundle() if client else Path(asked.bundle or folder.current)).resolve(), settings)
    if client and not asked.dry_run:
        folder.point(running.path)  # a kill between a swap and the link is made good
    recorded = asked.traffic or folder.scraped(metrics or "")
    if recorded is None:
        return done.ended("nothing", "no request since the last round")
    traffic = Traffic(recorded)
    done.stage = "evaluate"
    old = replay(running.plan, traffic)
    done.requests = old.prompt.requests
    done.stage = "plan"
    checkpoint, options = _source(asked, running, store, settings)
    plan = _planned(asked, running, checkpoint, options, traffic, settings)
    done.graphs, done.gain = len(plan.buckets), gains(old, replay(plan, traffic))
    if not worth(done.gain, asked.min_gain):
        return done.ended("nothing", f"the best plan saves less than {asked.min_gain:.1%}")
    done.stage = "compile"
    asked_for = Compilation(checkpoint, plan, options, store, settings)
    expected = asked_for.dry_run()
    done.estimated_s, done.reused = float(expected["estimated_seconds"]), int(expected["cached"])
    if asked.budget_s is not None and done.estimated_s > asked.budget_s:
        return done.ended(
            "nothing", f"compiling takes about {done.estimated_s:.0f} s, and a round may take {asked.budget_s:.0f} s"
        )
    if asked.dry_run:
        return done.ended("planned")
    output, began = folder.bundle(plan.digest()), time.monotonic()
    result = asked_for.compile(output, _within(asked.budget_s, began, report))
    done.compile_s = time.monotonic() - began
    done.built, done.reused = result.built, result.reused
    made = Bundle.open(output, settings)
    done.bundle, done.digest = str(output), made.manifest.digest
    done.stage = "swap"
    if client:
        client.swap(output)
    folder.point(output)
    folder.trim(output, running.path)
    return done.ended("swapped" if client else "ready")


def worth(gain: dict[str, float], least: float) -> bool:
    """Whether one phase gains at least `least`, and the other loses less than that."""
    return max(gain.values()) >= max(least, 1e-9) and min(gain.values()) > -max(least, 1e-9)


def _client(asked: Asked) -> Client:
    if asked.client is None:
        raise InputError("a loop without a server needs a recording of its traffic: --traffic FILE")
    return asked.client


def _source(
    asked: Asked, running: Bundle, store: Store, settings: Settings
) -> tuple[Checkpoint, CompileOptions]:  # fmt: skip
    """The checkpoint and options that the running bundle was compiled with. Raises CheckpointError, InputError."""
    from llmc.compiler.checkpoint import open_checkpoint
    from llmc.compiler.pipeline.provenance import find_model
    from llmc.deploy.facts import Facts

    manifest = running.manifest
    known = manifest.provenance
    model = asked.model or find_model(store, str(known.get("checkpoint", "")), str(known.get("model", "")))
    options = Facts.of(running).target.compiled_with(manifest.device, manifest.options)
    return open_checkpoint(model), replace(options, jobs=settings.threads)


def _planned(
    asked: Asked, running: Bundle, checkpoint: Checkpoint, options: CompileOptions, traffic: Any, settings: Settings
) -> Plan:
    """The plan for this traffic, of the running bundle's limits."""
    from llmc.compiler.pipeline.planning import plan_for

    limits = running.plan.limits.to_dict()
    return plan_for(
        checkpoint, **{name: limits[name] for name in LIMITS if limits.get(name) is not None}, traffic=traffic,
        max_graphs=asked.max_graphs or len(running.plan.buckets), device=options.device, options=options,
        settings=settings,
    )  # fmt: skip


def _within(budget_s: float | None, began: float, report: Callable[[Event], None]) -> Callable[[Event], None]:
    """Passes events on, and ends the compile once the budget is spent."""

    def passed(event: Event) -> None:
        report(event)
        if budget_s is not None and time.monotonic() - began > budget_s:
            raise OverBudgetError(f"a round may compile for {budget_s:.0f} s; what is done is kept for the next one")

    return passed
