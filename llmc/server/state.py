"""State shared by the server's parts: configuration, loading progress, and what is served."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from llmc.runtime.confined.limits import ChildLimits
from llmc.runtime.text.confined_chat import LIMITS as TEMPLATE_LIMITS
from llmc.server.aside import Replanner, SharedWork
from llmc.server.clients import Clients
from llmc.server.errors import bad_request

if TYPE_CHECKING:
    from prometheus_client import Metric

    from llmc.buckets.limits import Limits
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.engine.async_engine import AsyncEngine
    from llmc.runtime.pooling.pooler import AsyncPooler
    from llmc.runtime.text.chat import ChatTemplate
    from llmc.runtime.text.chat_format import ChatFormat
    from llmc.runtime.text.confined_encoding import ConfinedEncoder
    from llmc.runtime.text.tokenizer import Tokenizer
    from llmc.server.telemetry.metrics import Metrics
    from llmc.server.telemetry.snapshot import Snapshot

Phase = Literal["loading", "ready", "draining", "dead"]


@dataclass(frozen=True)
class ServerConfig:
    """Configuration of `llmc serve`; times in seconds, sizes in bytes.

    - `api_keys`: any of them opens every route but /health and /ready; empty: no key is required.
    - `max_queued_requests`: requests that may wait for a slot; more are refused with 503.
    - `max_body_bytes`: larger bodies are refused with 413.
    - `max_connections` and the per-client bounds of connections and requests: 0 is no bound; see clients.py.
    - `template_limits`: limits of rendering one conversation.
    - `warm_aside`: start the template process with the server, which then refuses a template that does not parse, and
      load grammar support once ready, because loading blocks everything for 0.3 s.
    - `admin_tokens`: any of them opens the routes below /admin, which do not exist without one.
    - `allow_model_change`: a swap may change the model.
    - `generation_config`: requests that give no temperature, top_p, … take the ones that the checkpoint recommends.
    - `chat_format`: in place of the bundle's.
    - `ssl_certfile`, `ssl_keyfile`: a certificate and its key in PEM; the server then speaks HTTPS.
    - `allowed_origins`: web pages of these origins may send requests ("*": all); see the CORS protocol.
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
    generation_config: bool = True
    allowed_origins: tuple[str, ...] = ()
    chat_format: ChatFormat | None = None
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None

    def recommended(self, served: Served) -> dict[str, float | int]:
        """Return the sampling parameters of requests that give none."""
        return served.recommended if self.generation_config else {}


@dataclass(frozen=True)
class Progress:
    """Loading progress: `done` of `total` parts of `stage`, and the seconds left, if known."""

    stage: str = "starting"
    done: int = 0
    total: int = 0
    eta_s: float | None = None


class Users:
    """Counts the requests that use something; only for the event loop's thread."""

    def __init__(self) -> None:
        self.count = 0
        self._none = asyncio.Event()
        self._none.set()

    def add(self, number: int) -> None:
        """Add a request (1) or remove one (-1)."""
        self.count += number
        if self.count:
            self._none.clear()
        else:
            self._none.set()

    async def gone(self) -> None:
        """Wait until there are no users."""
        await self._none.wait()


@dataclass(frozen=True)
class Served:
    """An opened, warm bundle with its running engine.

    `pooler` is the engine of a bundle that embeds or scores. `users`: its requests, until their last byte.
    """

    bundle: Bundle
    engine: AsyncEngine | AsyncPooler
    tokenizer: Tokenizer
    encoder: ConfinedEncoder
    chat_template: ChatTemplate | None
    model_name: str
    users: Users = field(default_factory=Users, compare=False)

    @cached_property
    def chat_format(self) -> ChatFormat | None:
        """What the chat template takes and its model writes, or None without a template."""
        return None if self.chat_template is None else self.chat_template.form

    @cached_property
    def recommended(self) -> dict[str, float | int]:
        """Sampling parameters that the checkpoint recommends."""
        from llmc.runtime.engine.sampling.params import recommended

        return recommended(self.bundle.sampling)

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Ids of the special tokens, by their texts."""
        tokens = ((self.tokenizer.id_to_token(index), index) for index in sorted(self.tokenizer.special_ids))
        return {text: index for text, index in tokens if text}

    @cached_property
    def mark_ids(self) -> list[int]:
        """Ids of the special tokens that mark reasoning and tool calls."""
        form = self.chat_format
        return [] if form is None else [index for text, index in self.special_tokens.items() if form.marks(text)]

    @property
    def pooler(self) -> AsyncPooler | None:
        """The engine of an embedding or scoring bundle, or None."""
        from llmc.runtime.pooling.pooler import AsyncPooler

        return self.engine if isinstance(self.engine, AsyncPooler) else None

    @property
    def generating(self) -> AsyncEngine:
        """The engine of a bundle that generates text; raises ApiError for any other."""
        from llmc.runtime.pooling.pooler import AsyncPooler

        if isinstance(self.engine, AsyncPooler):
            task = self.bundle.task
            raise bad_request(f"the served model {task}s, and generates no text", code="unsupported_endpoint")
        return self.engine

    @property
    def names(self) -> list[str]:
        """Valid model names in requests: the base name, then the adapters in the engine's order."""
        return [self.model_name, *(adapter.name for adapter in self.bundle.adapters)]

    def adapter(self, model: str | None) -> int:
        """Return the adapter number of `model`, which must be in `names`; None: the base model."""
        return 0 if model is None else self.names.index(model)

    def close(self, timeout_s: float | None = None) -> bool:
        """Stop the engine, see AsyncEngine.close, and its helper processes; idempotent."""
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
    """State shared by all routes.

    The loader sets `served` or `load_error`, the engine's thread `aside`; only the event loop sets the others.
    """

    config: ServerConfig
    metrics: Metrics
    snapshot: Snapshot
    progress: Progress = field(default_factory=Progress)
    aside: Progress | None = None
    """Progress of the warm-up between requests, if any."""
    served: Served | None = None
    load_error: BaseException | None = None
    draining: bool = False
    swap: Callable[[str | None, bool], Awaitable[Any]] | None = None
    """Serves another bundle: `Swapper.swap`, once the server runs."""
    all_metrics: Callable[[], Awaitable[Sequence[Metric]]] | None = None
    """Returns the metrics of all replicas; None without replicas."""
    awaits: Callable[[], Progress | None] = lambda: None
    """Returns the startup progress of other replicas that this one, though ready, must wait for."""
    clients: Clients = field(init=False)
    rendered: tuple[SharedWork, SharedWork] = field(default_factory=lambda: (SharedWork(), SharedWork()))
    """Rendered metrics, plain and as OpenMetrics, shared by concurrent scrapes."""
    replanner: Replanner = field(default_factory=Replanner)
    held_bytes: int = 0
    """Bytes of long bodies that are being read; see body.py."""
    started_at: float = field(default_factory=time.time)

    def metrics_as(self, replica: str) -> Sequence[Metric]:
        """Return this server's metrics with a replica label."""
        from llmc.server.telemetry.metrics import labelled

        return labelled(self.metrics.families(ready=self.phase == "ready"), replica)

    def __post_init__(self) -> None:
        self.clients = Clients(
            self.config.max_connections, self.config.max_connections_per_client, self.config.max_requests_per_client
        )

    @property
    def phase(self) -> Phase:
        """dead once loading or the engine failed; otherwise draining, loading or ready."""
        if self.load_error is not None or (self.served is not None and self.served.engine.error is not None):
            return "dead"
        if self.draining:
            return "draining"
        return "loading" if self.served is None else "ready"
