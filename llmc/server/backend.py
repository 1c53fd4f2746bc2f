"""The application over a bundle that it loads, behind any HTTP server."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

from llmc.runtime.bundle import Bundle
from llmc.runtime.engine.observer import Observer, Observers
from llmc.runtime.text.confined_encoding import require_sound
from llmc.server.app import build_app
from llmc.server.events import OnEvent, Ready, WarmAside
from llmc.server.loading import Loaded, OpenBundle, StoppedLoadingError, load, read_grammars
from llmc.server.state import Progress, ServerConfig, ServerState
from llmc.server.swapping import Reopen, Swapper
from llmc.server.telemetry.metrics import Metrics
from llmc.server.telemetry.snapshot import Snapshot
from llmc.server.warming import WarmUp, aside

if TYPE_CHECKING:
    from llmc.runtime.startup.opening import EngineOptions


class Backend:
    """`app` responds from the start; `load` makes it ready, and `swapper` replaces the served bundle.

    `observers` watch the engine in addition to the metrics; `report` receives events. `stopped`: whether the process is
    ending, so that loading should stop. `reopen` finds the replacement of what `open_bundle` returned; `settle` is
    called in a thread after a replaced bundle is closed.
    """

    def __init__(
        self, config: ServerConfig, open_bundle: OpenBundle, options: EngineOptions, *, warm_up: WarmUp | None = None,
        observers: Sequence[Observer] = (), report: OnEvent = lambda _: None,
        cache_counters: Callable[[], Mapping[str, int]] | None = None, stopped: Callable[[], bool] = lambda: False,
        reopen: Reopen | None = None, settle: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        metrics, snapshot = Metrics(), Snapshot()
        self.state = ServerState(config, metrics, snapshot)
        self._open_bundle, self._options, self._warm_up = open_bundle, options, warm_up or WarmUp()
        self._report, self._stopped = report, stopped
        self._cache_counters = cache_counters
        self._observer = Observers([metrics, snapshot, *observers])
        self._began = time.monotonic()
        self.swapper = Swapper(
            self.state,
            reopen or (lambda _, on_progress: open_bundle(on_progress)),
            self._load_beside,
            self._begin,
            report,
            settle,
        )
        self.state.swap = self.swapper.swap
        self.app = _ClosesWhenDraining(build_app(self.state), self.state)

    def load(self) -> bool:
        """Open, warm up and serve; false if loading was stopped. Errors become the state's `load_error`."""
        try:
            loaded = load(self._open_bundle, self.state.config, self._options, self._warm_up, self._progress)
        except StoppedLoadingError:
            return False
        except BaseException as e:  # noqa: BLE001 - the server's thread raises it
            self.state.load_error = e
        else:
            if self._stopped():
                loaded.served.close()
                return False
            self._begin(loaded)
            served, seconds = loaded.served, time.monotonic() - self._began
            device = served.bundle.manifest.device
            self._report(Ready(served.model_name, device, seconds, loaded.warm.buckets, loaded.compilations))
        return True

    def prepare(self) -> None:
        """Load grammar support once requests are served."""
        if self.state.served is not None:
            read_grammars(self.state.served, self.state.config)

    def _load_beside(self, bundle: Bundle, on_progress: Callable[[Progress], None]) -> Loaded:
        """Load another bundle in the swapper's thread, without observers."""
        if bundle.has_tokenizer:
            require_sound(bundle.files.read("tokenizer.json"))
        loaded = load(lambda _: bundle, self.state.config, self._options, self._warm_up, on_progress)
        read_grammars(loaded.served, self.state.config)
        return loaded

    def _progress(self, progress: Progress) -> None:
        if self._stopped():
            raise StoppedLoadingError
        self.state.progress = progress
        self._report(progress)

    def _progress_aside(self, progress: Progress) -> None:
        """Runs in the engine's thread, like `_warm_aside`."""
        self.state.aside = progress

    def _warm_aside(self, event: WarmAside) -> None:
        self.state.aside = None
        self._report(event)

    def _begin(self, loaded: Loaded) -> None:
        served = loaded.served
        pooler, manifest = served.pooler, served.bundle.manifest
        plan = served.bundle.plan if pooler is None else None
        self.state.metrics.bind(
            served.model_name, lambda: self.swapper.stats, self._cache_counters, plan, manifest.device, loaded.origin,
            manifest.digest,
        )  # fmt: skip
        if plan is not None:
            self.state.snapshot.bind(plan)
        if pooler is not None:
            self.state.metrics.bind_pooling(lambda: pooler.pooler.statistics)
        else:
            served.generating.engine.observer = self._observer
        self.state.served = served
        if loaded.warm.aside is not None:
            executor = served.generating.engine.core.executor
            served.generating.work_between(aside(executor, loaded.warm.aside, self._progress_aside, self._warm_aside))


class _ClosesWhenDraining:
    def __init__(self, app: Any, state: ServerState) -> None:
        self._app, self._state = app, state

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        async def closing(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start" and self._state.draining:
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        await self._app(scope, receive, closing)
