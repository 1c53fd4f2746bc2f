"""Load a bundle from disk until it is open, warm and ready to serve; runs in a thread next to the server."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Literal, get_args

from llmc.artifacts.local.origins import verification_origin
from llmc.errors import ArtifactError, InputError, LlmcError, UnknownNameError
from llmc.runtime.bundle import Bundle
from llmc.runtime.engine.async_engine import AsyncEngine
from llmc.runtime.startup.capturing import CaptureChoice, Capturing
from llmc.runtime.startup.opening import EngineOptions, open_engine, open_executor
from llmc.runtime.startup.prefilling import warm_prompts
from llmc.runtime.startup.warming import OPENING, Warming
from llmc.runtime.text.confined_chat import ConfinedTemplate
from llmc.runtime.text.confined_encoding import ConfinedEncoder
from llmc.server.events import WarmAside
from llmc.server.state import Progress, Served, ServerConfig

if TYPE_CHECKING:
    from llmc.buckets.bucket import Bucket
    from llmc.buckets.plan import Plan
    from llmc.runtime.executors.base import Executor


How = Literal["all", "open", "aside"]
"""How much to warm up before the server is ready.

- all: run every bucket, and capture graphs.
- open: run the smallest bucket of each phase, open the other executables, and capture nothing.
- aside: run the smallest buckets, then between requests the others and the captures.
"""

OnProgress = Callable[[Progress], None]

STAGE, GRAPHS = "warm up", "capture graphs"
_log = logging.getLogger("llmc")


@dataclass(frozen=True)
class WarmUp:
    """What to warm up before requests arrive.

    `uses`: how often traffic runs each bucket of a plan, to run the hottest first. `capture`: how a device that
    captures graphs divides its memory.
    """

    how: How = "all"
    uses: Callable[[Plan], Mapping[Bucket, int]] | None = None
    capture: CaptureChoice = field(default_factory=CaptureChoice)


def how_of(name: str) -> How:
    """Return the How called `name`; raises UnknownNameError."""
    for known in get_args(How):
        if name == known:
            return known  # type: ignore[no-any-return]
    raise UnknownNameError("warm-up", name, get_args(How))


class Countdown:
    """Progress through the parts of a stage; estimates the time left from their `costs`, in any unit."""

    def __init__(self, stage: str, costs: Sequence[float], on_progress: OnProgress) -> None:
        self._stage, self._report = stage, on_progress
        self._costs = [0.0, *accumulate(costs)]
        self._began = time.monotonic()
        on_progress(Progress(stage, 0, len(costs)))

    def __call__(self, done: int) -> None:
        """Report that `done` parts, at least one, are done."""
        each = (time.monotonic() - self._began) / self._costs[done]
        left = each * (self._costs[-1] - self._costs[done])
        self._report(Progress(self._stage, done, len(self._costs) - 1, left))


@dataclass(frozen=True)
class Aside:
    """Work between requests: the steps of `warming`, then captures of their buckets and of those that `ran` before."""

    warming: Warming
    ran: tuple[Bucket, ...]
    capturing: Capturing | None


@dataclass(frozen=True)
class Warm:
    """The number of buckets that ran before the server was ready, and the work left for between requests."""

    buckets: int
    aside: Aside | None = None


def warm(executor: Executor, plan: Plan, warm_up: WarmUp, on_progress: OnProgress) -> Warm:
    """Run the part of `warm_up` that comes before requests, after dividing the device's memory.

    Opens all other executables too, unless buckets are left to run between requests. Raises errors of the executor, so
    a graph that cannot run here is found now. Buckets that cannot be captured run without a graph.
    """
    capturing = Capturing.of(executor, plan, warm_up.capture)
    if capturing is not None:
        on_progress(Progress("profile run"))
        capturing.divide()
    uses = None if warm_up.uses is None else warm_up.uses(plan)
    smallest = warm_up.how != "all" and not executor.capabilities.exact
    warming = Warming(executor, plan, uses=uses, smallest=smallest)
    progress = Countdown(STAGE, [one.cost for one in warming.steps], on_progress)
    for done, warmed in enumerate(warming.run(), 1):
        if warmed.error is not None:
            _log.error("%s failed to warm up", warmed.bucket)
            raise warmed.error
        progress(done)
    if warm_up.how == "aside" and smallest:
        ran = tuple(one.bucket for one in warming.steps)
        return Warm(len(ran), Aside(Warming(executor, plan, uses=uses, without=ran), ran, capturing))
    if warm_up.how == "open":
        on_progress(Progress("open executables"))
    elif capturing is not None:
        for _ in _captured(capturing, [one.bucket for one in warming.steps], on_progress):
            pass
    executor.open_all()
    executor.compilations.ready()
    return Warm(len(warming.steps))


def _captured(capturing: Capturing, buckets: Sequence[Bucket], on_progress: OnProgress) -> Iterator[Bucket]:
    """Capture the next graph for each item requested, and report progress; some may not fit."""
    progress = Countdown(GRAPHS, [bucket.tokens + OPENING for bucket in buckets], on_progress)
    for done, bucket in enumerate(capturing.run(buckets), 1):
        progress(done)
        yield bucket


def aside(
    executor: Executor, left: Aside, on_progress: OnProgress, over: Callable[[WarmAside], None]
) -> Iterator[None]:
    """Run or capture a bucket for each item requested, then call `over`. Errors of a bucket are logged."""
    warming = left.warming
    progress = Countdown(STAGE, [one.cost for one in warming.steps], on_progress)
    failed: list[str] = []
    ran = list(left.ran)
    seconds = 0.0
    for done, warmed in enumerate(warming.run(), 1):
        seconds += warmed.seconds
        if warmed.error is not None:
            failed.append(str(warmed.bucket))
            _log.error("%s failed to warm up: %s: %s", warmed.bucket, type(warmed.error).__name__, warmed.error)
        else:
            ran.append(warmed.bucket)
        progress(done)
        yield
    if left.capturing is not None:
        yield from _aside_captured(left.capturing, ran, on_progress)
    try:
        executor.open_all()  # all are open, except those without a bucket and those that failed
    except Exception as e:  # noqa: BLE001 - logged, like a bucket's error
        _log.error("%s: %s", type(e).__name__, e)
    executor.compilations.ready()
    over(WarmAside(len(warming.steps) - len(failed), tuple(failed), seconds, executor.compilations.count))


def _aside_captured(capturing: Capturing, buckets: Sequence[Bucket], on_progress: OnProgress) -> Iterator[None]:
    try:
        for _ in _captured(capturing, buckets, on_progress):
            yield
    except Exception as e:  # noqa: BLE001 - logged, like a bucket's error
        _log.error("capturing graphs ended: %s: %s", type(e).__name__, e)


OpenBundle = Callable[[Callable[[Progress], None]], Path | Bundle]
"""Finds or builds the bundle to serve, and reports its progress; raises LlmcError."""


class StoppedLoadingError(Exception):
    """The process was stopped while loading."""


@dataclass(frozen=True)
class Loaded:
    """A loaded bundle, its warm-up and compilations, and its verification's origin (artifacts/local/origins.py)."""

    served: Served
    warm: Warm
    compilations: int
    origin: str

    @classmethod
    def of(cls, served: Served, warm: Warm, compilations: int) -> Loaded:
        """Build a Loaded with the bundle's own origin."""
        bundle = served.bundle
        return cls(served, warm, compilations, verification_origin(bundle.files, None, bundle.settings).name)


def as_bundle(found: Path | Bundle) -> Bundle:
    """Open a path now, so that a link that moves later does not change what is read."""
    return found if isinstance(found, Bundle) else Bundle.open(found.resolve())


def read_grammars(served: Served, config: ServerConfig) -> None:
    """Load grammar support in advance, if configured. After an error, requests that need it get the error."""
    if served.pooler is None and config.warm_aside:
        with contextlib.suppress(LlmcError):
            served.generating.engine.constraints(at_once=False)


def load(
    open_bundle: OpenBundle, config: ServerConfig, options: EngineOptions, warm_up: WarmUp, on_progress: OnProgress
) -> Loaded:
    """Open a bundle, run its graphs as `warm_up` says, and start the engine without observers.

    `on_progress` receives all progress; it may raise StoppedLoadingError to stop. Raises LlmcError if the bundle is
    unavailable or cannot be served here, and closes everything.
    """
    on_progress(Progress("open"))
    bundle = as_bundle(open_bundle(on_progress))
    on_progress(Progress("tokenizer"))
    if "tokenizer.json" not in bundle.manifest.files:
        raise ArtifactError(
            f"{bundle.path}: no tokenizer in the bundle, and a server takes text; compile a checkpoint that has a "
            f"tokenizer.json: {bundle.recompile_hint}"
        )
    tokenizer = bundle.tokenizer
    tokenizer.load()
    _ = tokenizer.width  # computed now, because it reads the whole vocabulary
    name = _served_name(bundle, config)
    if bundle.task != "generate":
        return _load_pooler(bundle, name, config, options, on_progress)
    template = None
    with contextlib.ExitStack() as opened:
        if bundle.chat_template is not None:
            template = ConfinedTemplate(
                bundle.chat_template,
                bundle.special_tokens,
                config.chat_format or bundle.chat_format,
                config.template_limits,
            )
            opened.callback(template.close)
            if config.warm_aside:
                template.start()  # the process starts while the executor opens
        executor = open_executor(bundle, options)
        opened.callback(executor.close)
        warmed = warm(executor, bundle.plan, warm_up, on_progress)
        if template is not None and config.warm_aside:
            template.check()
        engine = open_engine(bundle, executor, options)
        if (prefiller := engine.core.prefiller) is not None:
            opened.callback(prefiller.close)
            on_progress(Progress("prefill side"))
            prefiller.prepare(warm_prompts)
        running = AsyncEngine(engine, config.max_queued_requests, on_close=executor.close)
        opened.pop_all()
    encoder = ConfinedEncoder(lambda: bundle.files.read("tokenizer.json"))
    return Loaded.of(Served(bundle, running, tokenizer, encoder, template, name), warmed, executor.compilations.count)


def _load_pooler(
    bundle: Bundle, name: str, config: ServerConfig, options: EngineOptions, on_progress: OnProgress
) -> Loaded:
    """Open an embedding or scoring bundle and run every bucket, or one text of each length if any shape runs."""
    from llmc.runtime.pooling.pooler import AsyncPooler, Pooler
    from llmc.runtime.startup.pool_warming import PoolWarming

    pooler = Pooler(bundle, options.threads)
    try:
        warming = PoolWarming(pooler)
        on_progress(Progress(STAGE, 0, len(warming.buckets)))
        for done, warmed in enumerate(warming.run(), 1):
            if warmed.error is not None:
                raise warmed.error
            on_progress(Progress(STAGE, done, len(warming.buckets)))
        pooler.encoder.compilations.ready()
    except BaseException:
        pooler.close()
        raise
    encoder = ConfinedEncoder(lambda: bundle.files.read("tokenizer.json"))
    engine = AsyncPooler(pooler, config.max_queued_requests)
    compiled = pooler.encoder.compilations.count
    return Loaded.of(
        Served(bundle, engine, bundle.tokenizer, encoder, None, name), Warm(len(warming.buckets)), compiled
    )


def _served_name(bundle: Bundle, config: ServerConfig) -> str:
    """Raises InputError if an adapter has the name."""
    name = config.served_model_name or model_name(bundle)
    if any(adapter.name == name for adapter in bundle.adapters):
        raise InputError(f"--served-model-name {name}: an adapter of the bundle is called that; give the model another")
    return name


def model_name(bundle: Bundle) -> str:
    """Return the model's name without its folders, or the bundle's name."""
    name = str(bundle.manifest.model.get("name") or bundle.manifest.provenance.get("model") or "")
    return PurePath(name).name or bundle.path.name
