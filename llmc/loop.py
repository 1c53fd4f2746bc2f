"""Keep a server's bundle fitted to its traffic, in rounds of record, evaluate, plan, compile and swap.

Any stage may end a round and says why. The gain is the share of a phase's padded tokens that the new plan saves on the
same traffic: 1 - new / old. The two phases' costs have different units (buckets/cost.py), so they are not added: a plan
is worth it if it saves at least `min_gain` of one phase and costs the other less than that.

The folder of a loop:

<folder>/current            a link to the served bundle
<folder>/bundles/<12 hex>   a bundle, named by its plan's digest; the newest two are kept
<folder>/last.prom          the scrape that ended the last round
<folder>/now.prom           that scrape and a new one: the requests in between
<folder>/loop.jsonl         the log: one object per round (`Round`)
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from llmc.artifacts.atomic_write import temporary_name, write_atomic
from llmc.artifacts.flock import flock
from llmc.buckets.traffic.formats.prometheus.exposition import samples
from llmc.buckets.traffic.formats.prometheus.increase import Increase
from llmc.buckets.traffic.formats.prometheus.live import fetch
from llmc.errors import ArtifactError, InputError, LlmcError

if TYPE_CHECKING:
    from llmc.artifacts.store.store import Store
    from llmc.buckets.plan import Plan
    from llmc.compiler.checkpoint.base import Checkpoint
    from llmc.compiler.options import CompileOptions
    from llmc.compiler.pipeline.compile import Event
    from llmc.runtime.bundle import Bundle
    from llmc.settings import Settings

ANSWER_S = 30.0
SWAP_S = 1800.0
"""Seconds that a server may take to open and warm up a bundle."""
ADMIN_PATH = "/admin/bundle"
KEPT = 2
"""Number of bundles to keep."""
RoundOutcome = Literal["swapped", "ready", "nothing", "planned", "stopped", "refused", "failed", "interrupted"]
LIMITS = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "max_prompt_len")


@dataclass(frozen=True)
class AdminClient:
    """Client for the server at `url` with its admin token. Methods raise InputError if the server does not answer
    properly."""

    url: str
    token: str

    def metrics(self) -> str:
        """Fetch /metrics."""
        return fetch(self.url.rstrip("/") + "/metrics")

    def bundle(self) -> Path:
        """The folder of the served bundle. Raises InputError if this host has no such folder."""
        folder = Path(str(self._ask("GET", None, ANSWER_S)["bundle"]))
        if not folder.is_dir():
            raise InputError(
                f"{self.url} serves {folder}, which does not exist here; run llmc loop on the server's host"
            )
        return folder

    def swap(self, bundle: Path) -> dict[str, Any]:
        """Make the server serve another bundle. Raises ArtifactError with the server's message if it refuses."""
        return self._ask("POST", {"bundle": str(bundle)}, SWAP_S)

    def _ask(self, method: str, body: Mapping[str, str] | None, seconds: float) -> dict[str, Any]:
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        try:
            connection = kind(parts.hostname or "", parts.port, timeout=seconds)
            try:
                connection.request(method, ADMIN_PATH, None if body is None else json.dumps(body), headers)
                answer = connection.getresponse()
                found: Any = json.loads(answer.read())
            finally:
                connection.close()
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise InputError(f"{self.url}{ADMIN_PATH} does not answer: {error or type(error).__name__}") from error
        if answer.status == 200:
            return dict(found)
        said = found.get("error", {}).get("message", answer.reason) if isinstance(found, dict) else answer.reason
        if answer.status in (401, 404):
            raise InputError(f"{self.url}: {said}; start llmc serve and llmc loop with the same LLMC_ADMIN_TOKEN")
        raise ArtifactError(f"{self.url} refused the bundle: {said}")


class LoopFolder:
    """The files that a loop keeps between rounds. They stay consistent if the process is killed at any time."""

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.abspath(path))  # noqa: PTH100 - links are the user's business
        self.current, self.log, self.now = self.path / "current", self.path / "loop.jsonl", self.path / "now.prom"
        self._bundles, self._last = self.path / "bundles", self.path / "last.prom"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the folder against other loops. Raises InputError if another loop holds it, and OSError."""
        self._bundles.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if flock(fd) is False:
                raise InputError(f"{self.path}: another llmc loop uses this folder; give each loop its own with -o")
            yield
        finally:
            os.close(fd)

    def bundle(self, plan_digest: str) -> Path:
        """The folder for a plan's bundle."""
        return self._bundles / plan_digest[:12]

    def scraped(self, metrics: str) -> Path | None:
        """Write the traffic since the last round to a file, given a scrape of now; None if there was none.

        Raises InputError if `metrics` is not a scrape.
        """
        before = self._last.read_text() if self._last.exists() else ""
        found = Increase(str(self.now))
        for scrape in (before, metrics) if before else (metrics,):
            found.add(samples(scrape.split("\n")))
        if not found.requests:
            return None
        write_atomic(self.now, (before + metrics).encode(), self.path)
        return self.now

    def over(self, metrics: str | None, line: Mapping[str, Any]) -> None:
        """End a round: log it, and let the next one start after this scrape."""
        with self.log.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if metrics is not None:
            write_atomic(self._last, metrics.encode(), self.path)

    def point(self, bundle: Path) -> None:
        """Make `current` a link to `bundle`."""
        with suppress(OSError):
            if self.current.readlink() == bundle:
                return
        fresh = temporary_name(self.path)
        fresh.symlink_to(bundle)
        fresh.replace(self.current)

    def trim(self, *used: Path) -> None:
        """Remove all bundles except `used` and the newest KEPT."""
        found = sorted(self._bundles.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        for bundle in found[KEPT:]:
            if bundle not in used:
                shutil.rmtree(bundle, ignore_errors=True)


class OverBudgetError(LlmcError):
    """A compile took longer than a round may; finished work stays in the store."""


@dataclass(frozen=True)
class LoopOptions:
    """Options of a loop. Times are in seconds.

    `client` is the server; without one, `bundle` is re-planned. `traffic` is a recording, by default the server's own
    histograms since the last round. `budget_s` is the compile time per round. `min_gain`: see the module, 0 … 1.
    `max_graphs` defaults to the bundle's current number. `model` is the checkpoint, by default the one that the bundle
    was compiled from.
    """

    folder: LoopFolder
    client: AdminClient | None = None
    bundle: str | None = None
    traffic: str | None = None
    budget_s: float | None = None
    min_gain: float = 0.05
    max_graphs: int | None = None
    model: str | None = None
    dry_run: bool = False


@dataclass
class Round:
    """Result of a round. `stage` is the last stage that began, `why` says why the round ended there.

    `gain` is per phase; `built` and `reused` count executables; `compile_s` and `estimated_s` are seconds.
    """

    time: float
    stage: str = "record"
    outcome: RoundOutcome = "interrupted"
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
        """Convert to a log entry."""
        return asdict(self)

    def ended(self, outcome: RoundOutcome, why: str = "") -> Round:
        """Record how the round ended."""
        self.outcome, self.why = outcome, why
        return self


def run_round(
    requested: LoopOptions, store: Store, settings: Settings, report: Callable[[Event], None], now: float | None = None
) -> Round:
    """Run one round, and log it unless it is a dry run. The server is unchanged unless it accepted the new bundle.

    Logs and re-raises KeyboardInterrupt. Errors of llmc end the round as "failed", or as "refused" if the server
    refuses.
    """
    done = Round(time.time() if now is None else now)
    metrics: str | None = None
    try:
        if requested.traffic is None:
            metrics = _client(requested).metrics()
        _do(requested, store, settings, report, done, metrics)
    except OverBudgetError as error:
        done.ended("stopped", str(error))
    except LlmcError as error:
        done.ended("refused" if done.stage == "swap" else "failed", str(error))
    except BaseException:
        requested.folder.over(None, done.to_dict())
        raise
    if not requested.dry_run:
        requested.folder.over(None if done.outcome in ("failed", "stopped") else metrics, done.to_dict())
    return done


def _do(
    requested: LoopOptions,
    store: Store,
    settings: Settings,
    report: Callable[[Event], None],
    done: Round,
    metrics: str | None,
) -> Round:
    from llmc.buckets.evaluation.replay import replay
    from llmc.buckets.planner.replanning import gains
    from llmc.buckets.traffic.source import Traffic
    from llmc.compiler.pipeline.compilation import Compilation
    from llmc.runtime.bundle import Bundle

    folder, client = requested.folder, requested.client
    running = Bundle.open((client.bundle() if client else Path(requested.bundle or folder.current)).resolve(), settings)
    if client and not requested.dry_run:
        folder.point(running.path)  # repairs the link after a kill between swap and link
    recorded = requested.traffic or folder.scraped(metrics or "")
    if recorded is None:
        return done.ended("nothing", "no request since the last round")
    traffic = Traffic(recorded)
    done.stage = "evaluate"
    old = replay(running.plan, traffic)
    done.requests = old.prompt.requests
    done.stage = "plan"
    checkpoint, options = _source(requested, running, store, settings)
    plan = _planned(requested, running, checkpoint, options, traffic, settings)
    done.graphs, done.gain = len(plan.buckets), gains(old, replay(plan, traffic))
    if not worth(done.gain, requested.min_gain):
        return done.ended("nothing", f"the best plan saves less than {requested.min_gain:.1%}")
    done.stage = "compile"
    requested_for = Compilation(checkpoint, plan, options, store, settings)
    expected = requested_for.dry_run()
    done.estimated_s, done.reused = float(expected["estimated_seconds"]), int(expected["cached"])
    if requested.budget_s is not None and done.estimated_s > requested.budget_s:
        return done.ended(
            "nothing",
            f"compiling takes about {done.estimated_s:.0f} s, and a round may take {requested.budget_s:.0f} s",
        )
    if requested.dry_run:
        return done.ended("planned")
    output, began = folder.bundle(plan.digest()), time.monotonic()
    result = requested_for.compile(output, _within(requested.budget_s, began, report))
    done.compile_s = time.monotonic() - began
    done.built, done.reused = result.built, result.reused
    created = Bundle.open(output, settings)
    done.bundle, done.digest = str(output), created.manifest.digest
    done.stage = "swap"
    if client:
        client.swap(output)
    folder.point(output)
    folder.trim(output, running.path)
    return done.ended("swapped" if client else "ready")


def worth(gain: dict[str, float], least: float) -> bool:
    """Whether one phase gains at least `least` and the other loses less than that."""
    return max(gain.values()) >= max(least, 1e-9) and min(gain.values()) > -max(least, 1e-9)


def _client(requested: LoopOptions) -> AdminClient:
    if requested.client is None:
        raise InputError("a loop without a server needs a recording of its traffic: --traffic FILE")
    return requested.client


def _source(
    requested: LoopOptions, running: Bundle, store: Store, settings: Settings
) -> tuple[Checkpoint, CompileOptions]:  # fmt: skip
    """The checkpoint and options of the running bundle. Raises CheckpointError and InputError."""
    from llmc.compiler.checkpoint import open_checkpoint
    from llmc.compiler.pipeline.provenance import find_model
    from llmc.compiler.pipeline.resolve import recorded_options
    from llmc.deploy.facts import BundleFacts

    manifest = running.manifest
    known = manifest.provenance
    model = requested.model or find_model(store, str(known.get("checkpoint", "")), str(known.get("model", "")))
    options = recorded_options(manifest, BundleFacts.of(running).target)
    return open_checkpoint(model), replace(options, jobs=settings.threads)


def _planned(
    requested: LoopOptions,
    running: Bundle,
    checkpoint: Checkpoint,
    options: CompileOptions,
    traffic: Any,
    settings: Settings,
) -> Plan:
    from llmc.compiler.pipeline.planning import plan_for

    limits = running.plan.limits.to_dict()
    return plan_for(
        checkpoint, **{name: limits[name] for name in LIMITS if limits.get(name) is not None}, traffic=traffic,
        max_graphs=requested.max_graphs or len(running.plan.buckets), device=options.device, options=options,
        settings=settings,
    )  # fmt: skip


def _within(budget_s: float | None, began: float, report: Callable[[Event], None]) -> Callable[[Event], None]:
    """Pass events on, and end the compile once the budget is spent."""

    def passed(event: Event) -> None:
        report(event)
        if budget_s is not None and time.monotonic() - began > budget_s:
            raise OverBudgetError(f"a round may compile for {budget_s:.0f} s; finished work is kept for the next one")

    return passed
