"""How a server finds or compiles its bundle, and reports progress meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.api import bundle_of, names_bundle

if TYPE_CHECKING:
    from llmc.artifacts.store.store import Store
    from llmc.compiler.pipeline.compile import Reporter
    from llmc.server.state import Progress
    from llmc.settings import Settings


@dataclass(frozen=True)
class ServedModel:
    """A bundle, or a checkpoint to compile with `options` of `llmc.compile`, as `bundle_of` takes them."""

    model: str
    device: str | None
    store: Store
    options: Mapping[str, Any] = field(default_factory=dict)
    weights: str | None = None

    def open(self, on_progress: Callable[[Progress], None], shown: Reporter = lambda _: None) -> Path:
        """The bundle folder. A compile reports progress to `on_progress` and each event to `shown`."""
        reported = _reported_by(on_progress)

        def report(event: Any) -> None:
            shown(event)
            reported(event)

        return bundle_of(self.model, self.device, dict(self.options), report, self.store, self.weights)

    def reopen(self, named: str | None, on_progress: Callable[[Progress], None]) -> Path:
        """The folder of the bundle `named`, by default of the current target of `model`. Never compiles."""
        from llmc.artifacts.bundle.manifest import read_manifest
        from llmc.artifacts.local.references import resolve
        from llmc.settings import Settings

        folder = resolve(named or self.model, Settings.from_environment(), self.store)
        read_manifest(folder)
        return bundle_of(
            str(folder), self.device, dict(self.options), _reported_by(on_progress), self.store, self.weights
        )

    def require_there(self, settings: Settings) -> None:
        """Raise what opening a missing bundle or checkpoint would raise, without compiling anything."""
        from llmc.artifacts.bundle.manifest import read_manifest
        from llmc.artifacts.local.precompiled import path_for
        from llmc.artifacts.local.references import resolve
        from llmc.compiler.checkpoint import read_config

        if names_bundle(self.model):
            read_manifest(resolve(self.model, settings, self.store))
        elif path_for(self.device or settings.device, self.model, settings.neuron_artifacts) is None:
            read_config(self.model)


def _reported_by(on_progress: Callable[[Progress], None]) -> Callable[[Any], None]:
    """A compile reporter that passes stages to `on_progress`, with the time left estimated from the parts so far."""
    from llmc.compiler.pipeline.compile import BeginReport, ExecutableReport, VerifyReport
    from llmc.server.state import Progress

    first: dict[str, tuple[int, float]] = {}

    def part(stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        begun, since = first.setdefault(stage, (done, now))
        left = (now - since) / (done - begun) * (total - done) if done > begun else None
        on_progress(Progress(stage, done, total, left))

    def report(event: Any) -> None:
        if isinstance(event, BeginReport):
            pass
        elif isinstance(event, ExecutableReport):
            part("compile", event.index, event.total)
        elif isinstance(event, VerifyReport):
            part("verify", event.done, event.total)
        elif event.seconds is None and event.total > 1:
            part(event.name, event.index, event.total)
        elif event.seconds is None:
            on_progress(Progress(event.name))

    return report
