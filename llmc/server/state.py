"""What the server's parts share: its configuration, how far it has come, and what it serves once it is ready."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from llmc.runtime.confined.limits import ChildLimits
from llmc.runtime.text.confined_chat import LIMITS as TEMPLATE_LIMITS
from llmc.server.clients import Clients
from llmc.server.errors import bad_request
from llmc.server.replanning import Replanner
from llmc.server.shared import SharedWork

if TYPE_CHECKING:
    from prometheus_client import Metric

    from llmc.buckets.limits import Limits
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.engine.async_engine import AsyncEngine
    from llmc.runtime.pooling.pooler import AsyncPooler
    from llmc.runtime.text.chat import ChatTemplate
    from llmc.runtime.text.confined_encoding import ConfinedEncoder
    from llmc.runtime.text.tokenizer import Tokenizer
    from llmc.server.telemetry.metrics import Metrics
    from llmc.server.telemetry.snapshot import Snapshot

Phase = Literal["loading", "ready", "draining", "dead"]


@dataclass(frozen=True)
class ServerConfig:
    """What `llmc serve` was asked for; times in seconds, sizes in bytes.

    `api_keys`: any of them opens every route but /health and /ready; none: no key is asked for. `max_queued_requests`:
    requests that may wait for a slot; more are refused with 503. `max_body_bytes`: larger bodies are refused with 413.
    `max_connections` and those of one client, and the requests of one that are answered at a time: 0 is no bound; see
    clients.py.
    `template_limits` bound the rendering of one conversation; `warm_aside`: the process for it starts with the server,
    which refuses a template that does not parse, and what grammars need is read as soon as the server is ready, since
    it holds up everything for 0.3 s.
    `admin_tokens`: any of them opens the routes below /admin, which are not there without one; `allow_model_change`:
    another bundle may be of another model.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    max_queued_requests: int = 64
    shutdown_timeout_s: float = 30.0
    max_body_bytes: int = 4 << 20
    served_model_name: str | None = None
    record_traffic: Path | None = None
    otlp_traces_endpoint: str | None = None
    max_connections: int = 1024
    max_connections_per_client: int = 256
    max_requests_per_client: int = 128
    template_limits: ChildLimits = TEMPLATE_LIMITS
    warm_aside: bool = True
    admin_tokens: tuple[str, ...] = ()
    allow_model_change: bool = False


@dataclass(frozen=True)
class Progress:
    """How far loading has come: `done` of `total` parts of `stage`, and the seconds left, where they can be told."""

    stage: str = "starting"
    done: int = 0
    total: int = 0
    eta_s: float | None = None


class Users:
    """Counts the requests that use something; for the event loop's thread alone."""

    def __init__(self) -> None:
        self.count = 0
        self._none = asyncio.Event()
        self._none.set()

    def add(self, number: int) -> None:
        """One more (1), or one less (-1)."""
        self.count += number
        if self.count:
            self._none.clear()
        else:
            self._none.set()

    async def gone(self) -> None:
        """Wait until there is none."""
        await self._none.wait()


@dataclass(frozen=True)
class Served:
    """An opened bundle, warm, with its engine running; `pooler` is that engine where the bundle embeds or scores.

    `users` are the requests that it was given to, from then to their last byte.
    """

    bundle: Bundle
    engine: AsyncEngine | AsyncPooler
    tokenizer: Tokenizer
    encoder: ConfinedEncoder
    chat_template: ChatTemplate | None
    model_name: str
    users: Users = field(default_factory=Users, compare=False)

    @property
    def pooler(self) -> AsyncPooler | None:
        """The engine of a bundle without a cache."""
        from llmc.runtime.pooling.pooler import AsyncPooler

        return self.engine if isinstance(self.engine, AsyncPooler) else None

    @property
    def generating(self) -> AsyncEngine:
        """The engine of a bundle that generates; raises ApiError for another."""
        from llmc.runtime.pooling.pooler import AsyncPooler

        if isinstance(self.engine, AsyncPooler):
            task = self.bundle.task
            raise bad_request(f"the served model {task}s, and generates no text", code="unsupported_endpoint")
        return self.engine

    @property
    def names(self) -> list[str]:
        """What requests may name as their model: the base's name, and each adapter's, in the engine's order."""
        return [self.model_name, *(adapter.name for adapter in self.bundle.adapters)]

    def adapter(self, model: str | None) -> int:
        """The number of the adapter that a request names as its model (None: the base); one of `names`."""
        return 0 if model is None else self.names.index(model)

    def close(self, timeout_s: float | None = None) -> bool:
        """Stop the engine, see AsyncEngine.close, and the processes beside it; may be called again."""
        self.encoder.close()
        if self.chat_template is not None:
            self.chat_template.close()
        closed = self.engine.close(timeout_s)
        self.bundle.files.close()
        return closed

    @property
    def limits(self) -> Limits:
        """The plan's limits, in tokens and sequences."""
        return (self.bundle.plan if self.bundle.task == "generate" else self.bundle.encode_plan).limits


@dataclass
class ServerState:
    """Shared by all routes. The loader sets `served` (or `load_error`), the engine's thread `aside`; the loop's thread
    alone sets the others."""

    config: ServerConfig
    metrics: Metrics
    snapshot: Snapshot
    progress: Progress = field(default_factory=Progress)
    aside: Progress | None = None
    """How far the warm-up between requests has come, while there is one."""
    served: Served | None = None
    load_error: BaseException | None = None
    draining: bool = False
    swap: Callable[[str | None, bool], Awaitable[Any]] | None = None
    """Serves another bundle: `Swapper.swap`, once the server runs."""
    all_metrics: Callable[[], Awaitable[Sequence[Metric]]] | None = None
    """Those of all replicas, where this is one of several."""
    awaits: Callable[[], Progress | None] = lambda: None
    """What it is not ready without, once it is so itself: other replicas that have yet to start."""
    clients: Clients = field(init=False)
    rendered: tuple[SharedWork, SharedWork] = field(default_factory=lambda: (SharedWork(), SharedWork()))
    """Metrics, plain and as OpenMetrics, for all who ask at once."""
    replanner: Replanner = field(default_factory=Replanner)
    held_bytes: int = 0
    """Of long bodies that are being read; see body.py."""
    started_at: float = field(default_factory=time.time)

    def metrics_as(self, replica: str) -> Sequence[Metric]:
        """This server's metrics as those of a replica of that name."""
        from llmc.server.telemetry.metrics import labelled

        return labelled(self.metrics.families(ready=self.phase == "ready"), replica)

    def __post_init__(self) -> None:
        self.clients = Clients(
            self.config.max_connections, self.config.max_connections_per_client, self.config.max_requests_per_client
        )

    @property
    def phase(self) -> Phase:
        """dead once loading or the engine failed; then draining, loading or ready."""
        if self.load_error is not None or (self.served is not None and self.served.engine.error is not None):
            return "dead"
        if self.draining:
            return "draining"
        return "loading" if self.served is None else "ready"
